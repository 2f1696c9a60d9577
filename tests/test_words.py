"""tools/words.py: the constructions that it counts, and the bound that it keeps."""

import importlib.util
from pathlib import Path

import pytest

_FILE = Path(__file__).parent.parent / "tools" / "words.py"
_SPEC = importlib.util.spec_from_file_location("words", _FILE)
assert _SPEC and _SPEC.loader
words = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(words)


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ("Bytes that a device keeps, if it keeps any.", 0),
        ("What is kept of a layer, where it is kept.", 2),
        ("The sum of which those that are alone are told", 4),
        ("The element says so: many values of this layer.", 0),
    ],
)
def test_constructions_are_counted(text: str, hits: int):
    assert words.hits(text) == hits


def test_docstrings_comments_and_messages_are_read(tmp_path: Path):
    (path := tmp_path / "room.py").write_text(
        '"""What is first."""\n\n# Nobody knows.\nx = "whatever"\n\n\n'
        'def fail(n):\n    raise ValueError(f"{n} lies alone")\n'
        'PATTERN = r"whatever (?:is|was) of [a-z]"\n'
        'print(f"{x} is what it is")\n'
        f'WORDS = "{"said alone " * 20}"\n'
    )
    found = {
        kind: words.hits(text) for _, kind, _, text in words.python_texts("room", path, "room.py") if text
    }
    assert found == {"docstrings": 1, "messages": 2, "comments": 1, "output": 1}


def test_pages_are_read_without_code(tmp_path: Path):
    (path := tmp_path / "page.md").write_text(
        "Nobody.\n```\nnobody\n```\n| nobody |\n| `nobody` |\n`nobody` [a](nobody.md)\n"
    )
    assert sum(words.hits(text) for *_, text in words.page_texts(path, "page.md")) == 2


def test_a_text_may_not_get_worse():
    recorded = {"cost": {"docstrings": 20}, "nn": {"comments": 1}}
    now = {
        "cost": {"docstrings": (21, 1000), "comments": (7, 1000)},
        "nn": {"comments": (2, 1000), "messages": (1, 100)},
    }
    assert [line.partition(";")[0] for line in words.risen(now, recorded)] == [
        "cost: docstrings have 21, allowed: 20",
        "cost: comments have 7, allowed: 2",
    ]
    assert words.risen({"cost": {"docstrings": (20, 100)}}, recorded) == []
