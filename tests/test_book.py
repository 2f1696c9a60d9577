"""The 170 things that the chapters describe: each has a command with the chapter's figure, or lines of code.

An item is found from its chapter's page in two clicks: the page, or a page or file that it links to, has the
command or the name of the code. Commands run in this process, each once.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from docs.generate.links import lines_of
from tests.book_items import ITEMS, Item
from tests.transcripts import blocks, run

import meshwright as mw
from meshwright.hardware.chip import Torus
from meshwright.notation.einsum import Einsum
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "docs" / "book"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#([^)\s]*))?\)")
NUMBERS = {"A": 41, "B": 29, "C": 35, "D": 47, "E": 18}


@dataclass(frozen=True)
class Reach:
    """A page and the documents that it links to. code: names of code by file that the page links to."""

    text: str
    near: str
    code: frozenset[tuple[str, str]]


@cache
def reach(page: str) -> Reach:
    path = BOOK / f"{page}.md"
    text = path.read_text(encoding="utf-8")
    near, code = [], set()
    for target, anchor in LINK.findall(text):
        linked = (path.parent / target).resolve()
        if linked.suffix == ".md":
            near.append(linked.read_text(encoding="utf-8"))
        elif linked.suffix == ".py":
            code.add((str(linked.relative_to(ROOT / "src" / "meshwright")), anchor))
    return Reach(text, "\n".join(near), frozenset(code))


@cache
def functions(path: str) -> frozenset[str]:
    """The tests of a file, those of a class as Class.name; without tests that are always skipped."""
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    found = set()
    for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        within = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and not any(
                "mark.skip" in ast.unparse(each) and "skipif" not in ast.unparse(each)
                for each in node.decorator_list
            ):
                found.add(within + node.name)
    return frozenset(found)


def flat(text: str) -> str:
    """The text with single spaces, so that a line break in a table or a sentence does not matter."""
    return re.sub(r"\s+", " ", text)


def test_every_thing_is_listed():
    """41, 29, 35, 47 and 18 things of the five texts, each once."""
    numbers = [item.number for item in ITEMS]
    assert numbers == [f"{text}{n}" for text, count in NUMBERS.items() for n in range(1, count + 1)]
    for item in ITEMS:
        assert item.command or item.test, f"{item.number} has neither a command nor a test"


@pytest.mark.parametrize(
    "item",
    [pytest.param(item, marks=pytest.mark.slow) if item.slow else item for item in ITEMS],
    ids=lambda item: item.number,
)
def test_item(item: Item):
    at = reach(item.page)
    if item.command:
        assert flat(item.command) in flat(at.text + at.near), f"not found from docs/book/{item.page}.md"
        assert flat(item.figure) in flat("\n".join(run(item.command)[1:])), item.thing
    if item.code:
        path, _, name = item.code.partition("#")
        assert (path, name) in at.code, f"docs/book/{item.page}.md does not link to {item.code}"
        first = lines_of(ROOT / "src" / "meshwright" / path, name)[0] if name else 1
        assert first > 0
    if item.test:
        path, _, name = item.test.partition("#")
        assert name in functions(path), f"tests/{path} has no {name}"
    if item.says:
        assert flat(item.says) in flat(at.text), f"docs/book/{item.page}.md does not say it"


@pytest.mark.parametrize("page", sorted(path.stem for path in BOOK.glob("*.md") if path.stem != "index"))
def test_transcripts_are_what_mw_prints(page: str) -> None:
    """`python -m tests.transcripts docs/book/training.md` rewrites what differs; read what did.

    Here, since the items before have run most of the commands.
    """
    transcripts = blocks((BOOK / f"{page}.md").read_text(encoding="utf-8"))
    assert transcripts
    assert [block.found for block in transcripts] == [block.expected for block in transcripts]


def test_flops_of_a_contraction_of_seven_letters() -> None:
    """A multiplication and an addition for each of 2**7 combinations of indices."""
    contraction = Einsum.parse("IJKL,IJMNO->KLMNO")
    assert contraction.flops(dict.fromkeys("IJKLMNO", 2)) == 2 * 2**7


def test_links_bind_generation_beyond_57_chips() -> None:
    """F / (B beta) with beta = 8.1e11 / 9e10 for v5e; the chapter takes beta = 8 and has 64 chips."""
    chip = mw.hardware("v5e:4x4").chip
    assert isinstance(chip.network, Torus)
    beta = chip.hbm_bytes_per_second / (2 * chip.network.one_way_bytes_per_second)
    assert beta == pytest.approx(9.0, abs=0.05)
    assert 16_384 / (32 * beta) == pytest.approx(57, abs=0.5)


def test_one_activation_of_a_prefill_has_80_megabytes() -> None:
    """bf16[T, D] of 8k tokens; 13B has D = 5,120."""
    config = mw.model("llama-2-13b")
    value = parse_array("x[T, D]")
    num_bytes = value.bytes_per_device(Mesh({"X": 1}), {"T": 8192, "D": config.d_model}, "bf16")
    assert num_bytes == pytest.approx(80e6, rel=0.05)
