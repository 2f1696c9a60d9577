"""The 170 things that the chapters describe: each has a command with the chapter's figure, or lines of code.

An item is found from its chapter's page in two clicks: the page, or a page or file that it links to, has the
command or the name of the code. Commands run in this process, each once.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from docs.generate.links import lines_of
from tests.book_items import ITEMS, Item
from tests.transcripts import blocks, run

import meshwright as mw
from meshwright.hardware.chip import Torus
from meshwright.models.count import count_params, kv_bytes_per_token
from meshwright.notation.einsum import Einsum
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array
from meshwright.plan.explain.thresholds import mixed_batch_shards, mixed_tokens_per_chip, slice_tokens

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "docs" / "book"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#([^)\s]*))?\)")
CODE = re.compile(r"\[`([\w.]+)`\]\(([^)#\s]+\.py)#([^)\s]+)\)")
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
    """The text with single spaces, so that line breaks in tables, sentences and commands do not matter."""
    return re.sub(r"\s+", " ", text.replace("\\\n", " "))


@pytest.mark.parametrize("page", sorted(path.stem for path in BOOK.glob("*.md") if path.stem != "index"))
def test_a_link_in_code_leads_to_the_name_that_it_shows(page: str) -> None:
    """To a function, a class, or the class with a field of that name."""
    path = BOOK / f"{page}.md"
    for words, target, anchor in CODE.findall(path.read_text(encoding="utf-8")):
        name = words.rpartition(".")[2]
        if name != anchor:
            file = (path.parent / target).resolve()
            first, last = lines_of(file, anchor)
            lines = file.read_text(encoding="utf-8").splitlines()[first - 1 : last]
            assert any(line.startswith(f"    {name}: ") for line in lines), f"{words} is not {anchor}"


def test_commands_are_as_wide_as_the_page() -> None:
    for path in BOOK.glob("*.md"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not line.startswith(("$ mw ", "mw ")) or len(line) <= 120, f"{path.name}: {line}"


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


def _largest_batch(kv_heads: int) -> float:
    """Sequences of 128k tokens that 16 chips of 16 GB hold next to the weights of question 2."""
    each = kv_bytes_per_token(mw.model("docs/book/served-18b.toml"), "int8") * kv_heads / 8
    return (16 * 16e9 - 18.4e9) / (each * 128e3)


@pytest.mark.parametrize(
    ("row", "right", "computed"),
    [
        ("262 kB | 1.05 MB", 1.05e6, lambda: 4 * 64 * 4096),
        ("16e9 parameters | 17.2e9, or 16 · 2^30", 17.2e9, lambda: 64 * (3 * 4096 * 16_384 + 4 * 4096**2)),
        ("compute-bound from S = 240 | 480 with multi-head attention", 480, lambda: 2 * 240),
        ("21.7% | 21.6%", 0.216, lambda: 6 * 37e9 * 14.8e12 / (2.79e6 * 3600 * 1.513e15)),
        ("13.9 | 13.7", 13.7, lambda: mixed_batch_shards(48_000, 32_768, 64, 2)),
        ("below 6e5 tokens | below 4e5", 4e5, lambda: 4096 * mixed_tokens_per_chip(2550, 32_768, 2)),
        ("13.1e9 in all | 0.33e9, 13.0e9", 0.33e9, lambda: count_params(mw.model("llama-2-13b")).vocab),
        ("13.1e9 in all | 0.33e9, 13.0e9", 13.0e9, lambda: count_params(mw.model("llama-2-13b")).total),
        ("300 ms | 310 ms", 0.310, lambda: 6 * 3e6 * 13e9 / (4096 * 4.6e14 * 0.4)),
        ("71,360 tokens | 73,440", 73_440, lambda: slice_tokens(4.59e14, 6.25e9)),
        ("131 kB a token; 14 and 112 sequences | 262 kB; 7 and 56", 7, lambda: _largest_batch(8)),
        ("131 kB a token; 14 and 112 sequences | 262 kB; 7 and 56", 56, lambda: _largest_batch(1)),
        ("1.3 ms | 1.4 ms", 1.4e-3, lambda: 18.4e9 / (16 * 8.1e11)),
        ("81 chips | 72", 72, lambda: 128 * (3 / 4) ** 2),
        ("1,600 TFLOP/s | GB; 8.1e11; 1,576", 1576e12, lambda: 8 * mw.hardware("v5e:8").chip.flops("bf16")),
        ("600M parameters, 365 µs | 537M, 331 µs", 537e6, lambda: 2 * 8192 * 32_768),
        ("600M parameters, 365 µs | 537M, 331 µs", 331e-6, lambda: 4 * 8192 * 32_768 / (4 * 8.1e11)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_of_the_texts_has_the_right_figure(
    row: str, right: float, computed: Callable[[], float]
) -> None:
    assert f"{row} |" in (BOOK / "index.md").read_text(encoding="utf-8")
    assert computed() == pytest.approx(right, rel=0.02)
