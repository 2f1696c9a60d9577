"""tools/words.py: the constructions that it counts, and the bound that it keeps."""

import ast
import importlib.util
from collections.abc import Iterator
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


_NOT_NAMES = {"one", "found", "there", "own", "told"}


def test_variables_say_what_they_are():
    """No variable has a name without a meaning outside of a comprehension of one line."""
    faults = [
        f"{path.name}:{line}: {name}"
        for path in (_FILE.parent.parent / "src").rglob("*.py")
        for line, name in _bound_names(ast.parse(path.read_text()))
        if name in _NOT_NAMES
    ]
    assert not faults


def _bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines and names of arguments and variables, without those of short comprehensions and lambdas."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from ((node.lineno, argument.arg) for argument in arguments)
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For):
            targets = [node.target]
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            is_long = (node.end_lineno or node.lineno) > node.lineno
            targets = [generator.target for generator in node.generators] if is_long else []
        for target in targets:
            yield from ((each.lineno, each.id) for each in ast.walk(target) if isinstance(each, ast.Name))


def test_a_name_without_a_meaning_is_found():
    short, long = "[one for one in x]", "[\n    one\n    for one in x\n]"
    assert [list(_bound_names(ast.parse(text))) for text in (short, long)] == [[], [(3, "one")]]
    assert list(_bound_names(ast.parse("def f(own): told = 1"))) == [(1, "own"), (1, "told")]
