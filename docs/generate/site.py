"""MkDocs' hook: what pages show of the code, pictures, and links out of docs/ to the repository.

A page holds `<!-- generated: commands -->` where the text that `PIECES["commands"]` makes is to stand.

    python -m docs.generate.site docs/reference/layouts.md

prints a page with its pieces.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.generate import commands, dtypes, hardware, json_keys, layouts, pictures, support  # noqa: E402
from docs.generate.links import outward, repository  # noqa: E402

from meshwright.cli import glossary  # noqa: E402

PIECES: dict[str, Callable[[], str]] = {
    "commands": commands.text,
    "json": json_keys.text,
    "layouts": layouts.text,
    "schedules": layouts.schedules,
    "number types": dtypes.text,
    "support of layouts": support.layouts,
    "support of models": support.models,
    "hardware": hardware.text,
    "families": support.read,
    "glossary": glossary.entries,
}
# The second line is for readers of the repository, and is left out of the site.
MARKER = re.compile(r"^<!-- generated: (?P<name>.*) -->(?:\n\*In a clone,.*\*)?$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """MkDocs asks which files the site has: the pictures too."""
    from mkdocs.structure.files import File

    for name, text in pictures.pictures().items():
        if kept := files.get_file_from_path(f"images/{name}"):
            files.remove(kept)
        files.append(File.generated(config, f"images/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """MkDocs asks for the text of a page."""
    return outward(filled(markdown), page.file.src_uri, repository())


def filled(markdown: str) -> str:
    """The page with every piece where its marker stands. Raises KeyError for one that nothing makes."""
    return MARKER.sub(lambda match: PIECES[match["name"]](), markdown)


if __name__ == "__main__":
    for page in sys.argv[1:]:
        print(filled(Path(page).read_text(encoding="utf-8")))
