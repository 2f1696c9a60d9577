"""Console blocks of the documents, `$ mw ...` and what it prints: checked by test_documents, rewritten by

    python -m tests.transcripts docs/how-to/read-a-plan.md README.md

A block that begins with `$ mw` holds a command and what it prints, up to the first heading where it ends in
`...`. A later block that begins with a heading holds that section of the same output.
"""

import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path

from meshwright.cli.main import BAD_INPUT
from meshwright.cli.main import main as mw

BLOCK = re.compile(r"^```(?P<kind>console|text)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT, MORE = "$ mw ", "..."
# Of this machine and not of what was asked.
VOLATILE = re.compile(r"considered in [\d.]+ m?s")


@dataclass(frozen=True)
class Block:
    """A console block as it stands, as it should be, and where it begins in its document."""

    found: str
    expected: str
    start: int


def blocks(text: str) -> list[Block]:
    """The transcripts of a document, those of `mw` alone."""
    output: list[str] = []
    checked: list[Block] = []
    for match in BLOCK.finditer(text):
        body = match["body"]
        if body.startswith(PROMPT):
            lines: list[str] = []
            for command in _commands(body):
                output = printed(command)
                lines += [*command.splitlines(), *output]
            if body.rstrip().endswith(MORE):
                lines = _until_heading(lines)
            checked.append(Block(body, _joined(lines), match.start("body")))
        elif section := _section(output, body.partition("\n")[0]):
            checked.append(Block(body, _joined(section), match.start("body")))
    return checked


@cache
def run(command: str) -> tuple[int, str, str]:
    """The exit status of `mw ...` in this process, with its stdout and its stderr. Each command runs once."""
    result, notes = StringIO(), StringIO()
    with redirect_stdout(result), redirect_stderr(notes):
        status = mw(shlex.split(command)[1:])
    return status, result.getvalue(), notes.getvalue()


def printed(command: str) -> list[str]:
    """The lines that a command prints: its result, or why there is none."""
    status, result, notes = run(command.replace("\\\n", " ").removeprefix("$ "))
    text = notes if status == BAD_INPUT else result
    return [VOLATILE.sub("considered in a moment", line).rstrip() for line in text.splitlines()]


def _commands(body: str) -> list[str]:
    """Each line with a prompt and those it continues on."""
    found: list[str] = []
    continued = False
    for line in body.splitlines():
        if line.startswith(PROMPT):
            found.append(line)
        elif continued:
            found[-1] += f"\n{line}"
        continued = (line.startswith(PROMPT) or continued) and line.endswith("\\")
    return found


def _until_heading(output: list[str]) -> list[str]:
    """What stands before the first paragraph that follows the table."""
    rule = next(n for n, line in enumerate(output) if line.strip().startswith("──"))
    end = next(n for n in range(rule, len(output)) if not output[n])
    return [*output[:end], MORE]


def _section(output: list[str], heading: str) -> list[str]:
    if heading not in output:
        return []
    start = output.index(heading)
    end = next((n for n in range(start, len(output)) if not output[n]), len(output))
    return output[start:end]


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def rewrite(path: Path) -> None:
    """`path` with every transcript as it should be."""
    text = path.read_text(encoding="utf-8")
    for block in reversed(blocks(text)):
        text = text[: block.start] + block.expected + text[block.start + len(block.found) :]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rewrite(Path(name))
