"""The documents keep their word: examples in them run, and what they link to is there."""

import doctest
import re
from pathlib import Path

import pytest
from tests.transcripts import blocks

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


@pytest.mark.parametrize("document", ["README.md", "docs/api.md", "docs/notation.md", "docs/pipeline.md"])
def test_examples(document: str):
    result = doctest.testfile(
        str(ROOT / document), encoding="utf-8", module_relative=False, optionflags=doctest.ELLIPSIS
    )
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("document", ["README.md", "docs/hardware.md", "docs/models.md", "docs/plan.md"])
def test_transcripts_are_what_mw_prints(document: str):
    """`python -m tests.transcripts README.md docs/plan.md` rewrites what differs; read what did."""
    found = blocks((ROOT / document).read_text(encoding="utf-8"))
    assert found
    assert [block.found for block in found] == [block.expected for block in found]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    links = LINK.findall(document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []
