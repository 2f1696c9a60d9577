"""MkDocs' hook: what pages show of the code, pictures, and links out of docs/ to the repository.

A page holds `<!-- generated: commands -->` where the text that `PIECES["commands"]` makes is to stand.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.generate import commands, hardware, json_keys, layouts, pictures, support  # noqa: E402

PIECES: dict[str, Callable[[], str]] = {
    "commands": commands.text,
    "json": json_keys.text,
    "layouts": layouts.text,
    "schedules": layouts.schedules,
    "support of layouts": support.layouts,
    "support of models": support.models,
    "hardware": hardware.text,
}
MARKER = re.compile(r"^<!-- generated: (?P<name>.*) -->$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[(?P<words>[^\]]*)\]\((?P<target>(?:\.\./)+[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """MkDocs asks which files the site has: the pictures too."""
    from mkdocs.structure.files import File

    for name, text in pictures.pictures().items():
        files.append(File.generated(config, f"images/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """MkDocs asks for the text of a page."""
    return outward(filled(markdown), page.file.src_uri, repository())


def filled(markdown: str) -> str:
    """The page with every piece where its marker stands. Raises KeyError for one that nothing makes."""
    return MARKER.sub(lambda match: PIECES[match["name"]](), markdown)


def outward(markdown: str, path: str, address: str) -> str:
    """The page with its links out of docs/ made absolute, or, without an address, as words alone.

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
