"""Links to the repository, whose address no file of it holds."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<!!)\[(?P<words>[^\]]*)\]\((?P<target>(?:\.\./)+[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
_RELATIVE = re.compile(r"(?P<before>!?\[[^\]]*\]\()(?!https?:|#)(?P<target>[^)\s]+)\)")


def outward(markdown: str, path: str, address: str) -> str:
    """A page below docs/ with its links out of docs/ made absolute, or, without an address, as words alone.

    >>> outward("[a](../../src/a.py) [b](../b.md)", "how-to/x.md", "https://example.org/r")
    '[a](https://example.org/r/blob/main/src/a.py) [b](../b.md)'
    """

    def moved(match: re.Match[str]) -> str:
        target = os.path.normpath(Path("docs") / Path(path).parent / match["target"])
        if target.startswith("docs/"):
            return match[0]
        anchor = match["anchor"] or ""
        return f"[{match['words']}]({address}/blob/main/{target}{anchor})" if address else match["words"]

    return _LINK.sub(moved, markdown)


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
