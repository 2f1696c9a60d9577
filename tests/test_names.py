"""Names of variables and of files in the package, and the size of its classes."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_SOURCES = list((Path(__file__).parent.parent / "src").rglob("*.py"))
_NOT_NAMES = {"one", "found", "there", "own", "told"}
# Texts in which such a name may be bound, sentences among them. Other files are not parsed, to save seconds.
_BINDS = re.compile(rf"\b({'|'.join(_NOT_NAMES)})(\s*[:=]|,? in |, \w+ in |[,)])")


def test_variables_say_what_they_are():
    """No variable has a name without a meaning outside of a comprehension of one line."""
    faults = [
        f"{path.name}:{line}: {name}"
        for path in _SOURCES
        if _BINDS.search(text := path.read_text())
        for line, name in _bound_names(ast.parse(text))
        if name in _NOT_NAMES
    ]
    assert not faults


def _bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines and names of arguments and variables, without those of short comprehensions and lambdas."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from ((node.lineno, argument.arg) for argument in arguments)
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For):
            targets = [node.target]
        elif isinstance(node, ast.With):
            targets = [item.optional_vars for item in node.items if item.optional_vars]
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            is_long = (node.end_lineno or node.lineno) > node.lineno
            targets = [generator.target for generator in node.generators] if is_long else []
        for target in targets:
            yield from ((each.lineno, each.id) for each in ast.walk(target) if isinstance(each, ast.Name))


def test_a_name_without_a_meaning_is_found():
    short, long = "[one for one in x]", "[\n    one\n    for one in x\n]"
    assert [list(_bound_names(ast.parse(text))) for text in (short, long)] == [[], [(3, "one")]]
    assert list(_bound_names(ast.parse("def f(own): told = 1"))) == [(1, "own"), (1, "told")]
    assert list(_bound_names(ast.parse("with x as found: pass"))) == [(1, "found")]


def test_few_file_names_stand_in_several_rooms():
    """Files of one name in two rooms have one subject (attention, experts), and such names stay few."""
    rooms = Counter(path.name for path in _SOURCES if not path.name.startswith("__"))
    assert sum(number > 1 for number in rooms.values()) < 20


def test_classes_are_short():
    """A class of 350 lines or more has several subjects."""
    long = [text for path in _SOURCES if (text := path.read_text()).count("\n") >= 350]
    classes = (
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for text in long
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name: lines for name, lines in classes if lines >= 350} == {}
