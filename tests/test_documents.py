"""The documents keep their word: examples in them run, and what they link to is there."""

import doctest
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from docs.generate import commands, json_keys, layouts, pictures, site
from docs.generate.links import absolute, lines_of, outward
from tests.transcripts import blocks

from meshwright.cli.main import COMMANDS
from meshwright.layout.short import WORDS

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *PAGES])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = (
    "README.md",
    "docs/reference/python.md",
    "docs/reference/notation.md",
    "docs/explanations/pipeline.md",
    "docs/book/sharding.md",
    "docs/book/transformers.md",
    "docs/book/training.md",
    "docs/book/inference.md",
)
TRANSCRIPTS = (
    "README.md",
    "docs/reference/hardware.md",
    "docs/reference/models.md",
    "docs/how-to/read-a-plan.md",
    "docs/how-to/shard-a-product.md",
)
SLOW_TRANSCRIPTS = (
    "docs/how-to/does-it-fit.md",
    "docs/how-to/my-own.md",
    "docs/how-to/plan-a-70b-run.md",
    "docs/how-to/plan-post-training.md",
    "docs/start/tutorial.md",
)


@pytest.mark.parametrize("document", EXAMPLES)
def test_examples(document: str):
    result = doctest.testfile(
        str(ROOT / document), encoding="utf-8", module_relative=False, optionflags=doctest.ELLIPSIS
    )
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize(
    "document", [*TRANSCRIPTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_TRANSCRIPTS)]
)
def test_transcripts_are_what_mw_prints(document: str, monkeypatch: pytest.MonkeyPatch):
    """`python -m tests.transcripts README.md docs/book/training.md` rewrites what differs; read what did."""
    monkeypatch.chdir(ROOT)
    found = blocks((ROOT / document).read_text(encoding="utf-8"))
    assert found
    assert [block.found for block in found] == [block.expected for block in found]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path):
    missing = []
    for target, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        path = document.parent / target if target else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor[1:] not in _anchors(path)):
            missing.append(target + anchor)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_to_code_name_what_it_defines(page: Path):
    """`[...](../../src/meshwright/cost/x.py#name)` leads to the lines of `name`, today."""
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.endswith(".py") and anchor:
            first, last = lines_of((page.parent / target).resolve(), anchor[1:])
            assert 0 < first <= last


def test_a_link_to_code_becomes_its_lines():
    text = "[a](../../src/meshwright/notation/mesh.py#Mesh)"
    first, last = lines_of(ROOT / "src/meshwright/notation/mesh.py", "Mesh")
    at = f"[a](https://example.org/r/blob/main/src/meshwright/notation/mesh.py#L{first}-L{last})"
    assert outward(text, "how-to/x.md", "https://example.org/r") == at
    with pytest.raises(KeyError, match="defines no Nothing"):
        lines_of(ROOT / "src/meshwright/notation/mesh.py", "Nothing")


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub name them."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_navigation():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    shown = list(_pages(settings["nav"]))
    assert sorted(shown) == [str(path.relative_to(ROOT / "docs")) for path in PAGES]


def _pages(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for inner in entry.values():
            yield from _pages(inner)
    elif isinstance(entry, list):
        for inner in entry:
            yield from _pages(inner)


def test_every_command_shown_is_understood():
    """Transcripts are run; of the others, which train or serve, every command and option exists."""
    known = {path: (command, context) for path, command, context in commands.commands()}
    shown = [(path.name, line) for path in DOCUMENTS for line in _commands_shown(path)]
    assert len(shown) > 60
    for name, line in shown:
        words = shlex.split(line, comments=True)[1:]
        path = next((tuple(words[:n]) for n in (2, 1) if tuple(words[:n]) in known), None)
        if not words or words[0].startswith("-"):
            continue
        assert path, f"{name}: {line}"
        command, _ = known[path]
        try:
            command.make_context("mw", words[len(path) :], resilient_parsing=True)
        except Exception as error:
            raise AssertionError(f"{name}: {line}: {error}") from error


def _commands_shown(path: Path) -> Iterator[str]:
    for body in FENCED.findall(path.read_text(encoding="utf-8")):
        for line in body.replace("\\\n", " ").splitlines():
            bare = line.removeprefix("$ ")
            if bare.startswith("mw ") and "..." not in bare and " -- " not in bare:
                yield bare.partition(" | ")[0].partition(" > ")[0]


def test_every_marker_has_what_makes_its_text():
    found = {name for path in PAGES for name in site.MARKER.findall(path.read_text(encoding="utf-8"))}
    assert found == set(site.PIECES)


def test_the_reference_is_whole():
    assert set(layouts.MEANINGS) <= set(WORDS)
    text = commands.text()
    assert all(f"## `mw {name}`" in text for name in COMMANDS)
    for piece in ("layouts", "schedules", "support of layouts", "support of models", "families"):
        assert "| `" in site.PIECES[piece]()


@pytest.mark.slow
def test_pictures_are_drawn_as_today():
    """`python -m docs.generate.pictures` draws them again."""
    for name, text in pictures.pictures().items():
        assert (pictures.IMAGES / name).read_text(encoding="utf-8") == text, name


def test_curves_are_drawn_as_today():
    for figure in pictures.plots():
        assert (pictures.IMAGES / figure.file_name).read_text(encoding="utf-8") == figure.standalone()


@pytest.mark.slow
def test_every_word_of_a_layout_is_explained():
    assert set(layouts.MEANINGS) == set(WORDS)


@pytest.mark.slow
def test_the_recorded_keys_are_those_of_the_commands():
    """`python -m docs.generate.json_keys` records them anew."""
    found = json_keys.running_keys()
    assert {name: set(keys) for name, keys in found.items()} == {
        name: set(keys) for name, keys in json_keys.recorded_keys().items()
    }


def test_links_out_of_the_documents_are_absolute_or_words():
    text = "[a](../../src/a.py) [b](../b.md#c)"
    assert outward(text, "how-to/x.md", "") == "a [b](../b.md#c)"
    at = "[a](https://example.org/r/blob/main/src/a.py) [b](../b.md#c)"
    assert outward(text, "how-to/x.md", "https://example.org/r") == at


def test_links_of_the_package_page_are_absolute():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = absolute(text, "https://example.org/r")
    assert LINK.findall(found) == [] and len(LINK.findall(text)) > 20
    assert "https://example.org/r/raw/main/docs/report.png" in found
