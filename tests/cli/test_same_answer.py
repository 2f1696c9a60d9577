"""A plan depends only on its command line, its files and meshwright: not on caches or earlier commands."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import meshwright

MIXTURE = "--model docs/book/served-moe.toml --weights-dtype int8 --kv-dtype int8"
# One of each kind of search and price; their models and machines share caches of passes and placements.
LINES = (
    f"plan serve {MIXTURE} --hardware v5e:4x4,v5e:4x8 --prompt-tokens 4k --output-tokens 512",
    "plan serve --model llama-3-8b --hardware h100:8 --prompt-tokens 1k --output-tokens 256 --engine vllm",
    f"plan serve --phase generate {MIXTURE} --hardware v5e:4x4 --batch 4 --context 8k --ideal",
    "plan train --model llama-3-8b --hardware h100:2x8 --batch-tokens 256Ki --seq-len 4096",
    "plan train --model llama-3-8b --hardware v5p:2x2x4 --batch-tokens 256Ki --seq-len 4096 --ideal",
    "plot decode --model llama-2-13b --hardware v5e:8 --context 4096",
)
# Prints the files that a command opens, and the processes, threads and connections that it starts.
WATCHED = """
import json, os, sys, threading
seen = []
def watch(event, given):
    if event == "open" and not isinstance(given[0], int):
        seen.append([event, os.fsdecode(given[0])])
    elif event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect"):
        seen.append([event, str(given[0])])
started = threading.Thread.start
threading.Thread.start = lambda self: (seen.append(["thread", self.name]), started(self))[1]
sys.addaudithook(watch)
from meshwright.cli.main import main
status = main(sys.argv[1:])
print(json.dumps([status, seen]), file=sys.stderr)
"""
# Runs the commands of its input one after the other, and prints the status and the output of each.
IN_TURN = """
import io, json, shlex, sys
from contextlib import redirect_stderr, redirect_stdout
from meshwright.cli.main import main
for line in json.load(sys.stdin):
    result = io.StringIO()
    with redirect_stdout(result), redirect_stderr(io.StringIO()):
        status = main(shlex.split(line))
    print(json.dumps([status, result.getvalue()]))
"""
ROOT = Path(__file__).parents[2]


def test_a_search_reads_only_the_model_and_the_package() -> None:
    line = "plan serve --model docs/book/served-18b.toml --hardware v5e:2x2 --weights-dtype int8"
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *f"{line} --prompt-tokens 1k --output-tokens 64".split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    status, seen = json.loads(done.stderr.splitlines()[-1])
    installed = tuple(
        str(Path(each).resolve()) for each in (Path(meshwright.__file__).parent, sys.prefix, sys.base_prefix)
    )
    others = [
        [event, name]
        for event, name in seen
        if not (event == "open" and str(Path(name).resolve()).startswith(installed))
    ]
    assert status == 0 and others == [["open", "docs/book/served-18b.toml"]]
    assert any(name.endswith("v5e.toml") for _, name in seen)


@pytest.mark.slow
def test_earlier_commands_change_no_answer() -> None:
    fresh = {line: _answers([line])[0] for line in LINES}
    assert all(status == 0 for status, _ in fresh.values())
    for order in (LINES[::-1], LINES[3:] + LINES[:3]):
        assert dict(zip(order, _answers(order), strict=True)) == fresh


def _answers(lines: Sequence[str]) -> list[tuple[int, str]]:
    """The status and the output of each command, run in one process; without the time of the search."""
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    answers = map(json.loads, done.stdout.splitlines())
    return [(status, re.sub(r"considered in [\d.]+ \w+", "", text)) for status, text in answers]
