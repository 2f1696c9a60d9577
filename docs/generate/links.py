"""Links to the repository, whose address no file of it holds."""

import ast
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<!!)\[(?P<words>[^\]]*)\]\((?P<target>(?:\.\./)+[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
_RELATIVE = re.compile(r"(?P<before>!?\[[^\]]*\]\()(?!https?:|#)(?P<target>[^)\s]+)\)")


def outward(markdown: str, path: str, address: str) -> str:
    """A page below docs/ with its links out of docs/ made absolute, or, without an address, as words alone.

    A link `cost/collectives.py#collective_seconds` goes to the lines of that function.

    >>> outward("[a](../../src/a.py) [b](../b.md)", "how-to/x.md", "https://example.org/r")
    '[a](https://example.org/r/blob/main/src/a.py) [b](../b.md)'
    """

    def moved(match: re.Match[str]) -> str:
        target = os.path.normpath(Path("docs") / Path(path).parent / match["target"])
        if target.startswith("docs/"):
            return match[0]
        anchor = match["anchor"] or ""
        if target.endswith(".py") and anchor:
            first, last = lines_of(ROOT / target, anchor[1:])
            anchor = f"#L{first}-L{last}"
        return f"[{match['words']}]({address}/blob/main/{target}{anchor})" if address else match["words"]

    return _LINK.sub(moved, markdown)


def lines_of(path: Path, name: str) -> tuple[int, int]:
    """The first and the last line of a function, class, method or constant of a module.

    Raises KeyError if the module does not define it.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        if any(getattr(target, "name", getattr(target, "id", None)) == name for target in targets) and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign)
        ):
            return node.lineno, node.end_lineno or node.lineno
    raise KeyError(f"{path} defines no {name}")


def repository() -> str:
    """The repository's address: MESHWRIGHT_REPOSITORY, else git's origin where that is a web address."""
    if named := os.environ.get("MESHWRIGHT_REPOSITORY"):
        return named.rstrip("/")
    asked = subprocess.run(
        ["git", "-C", str(ROOT), "remote", "get-url", "origin"], capture_output=True, text=True, check=False
    )
    found = asked.stdout.strip().removesuffix(".git")
    return found if found.startswith("https://") else ""


def absolute(markdown: str, address: str) -> str:
    """A page of the repository's root with every relative link made absolute; images as their raw files.

    >>> absolute("[a](docs/a.md) ![b](docs/b.png)", "https://example.org/r")
    '[a](https://example.org/r/blob/main/docs/a.md) ![b](https://example.org/r/raw/main/docs/b.png)'
    """

    def moved(match: re.Match[str]) -> str:
        kind = "raw" if match["before"].startswith("!") else "blob"
        return f"{match['before']}{address}/{kind}/main/{match['target']})"

    return _RELATIVE.sub(moved, markdown)
