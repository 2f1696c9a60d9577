"""A step of a user's own script: `train.py:step`, its arguments, and a patch for its findings."""

import ast
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from meshwright.errors import AuditError, in_a_line
from meshwright.files import read_text

# train.py:step, and the place of a finding: train.py:12, perhaps in brackets.
_FUNCTION_OF_SCRIPT = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
_PLACE = re.compile(r"\(?([^()\s]+\.py):(\d+)\)?$")
# The function that a patch adds, and the functions whose results it constrains, next to `@`.
_HELPER = "split_by_batch"
_PRODUCTS = ("dot", "matmul", "einsum", "dot_general", "tensordot")
# Findings that a constraint on the activations removes.
_CONSTRAINED = ("activations_not_constrained", "batch_not_sharded", "logits_not_sharded")


def is_script(word: str) -> bool:
    """Whether a word of the command line names a function of a script.

    >>> is_script("train.py:step"), is_script("runs/demo/plan.toml")
    (True, False)
    """
    return _FUNCTION_OF_SCRIPT.fullmatch(word) is not None


def load_step(function: str) -> tuple[Callable[..., Any], tuple[Any, ...], str]:
    """The jitted function of `train.py:step`, its arguments, and the script's name of its mesh.

    The script runs as a module. The arguments are its `step_args`: a tuple, or a function that returns one,
    of arrays or jax.ShapeDtypeStruct with a sharding. The name is empty if the script has no mesh. Raises
    AuditError if the script fails, or has no such function or arguments.
    """
    match = _FUNCTION_OF_SCRIPT.fullmatch(function)
    assert match, function
    path, name = Path(match[1]), match[2]
    read_text(path, AuditError)
    spec = spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        why = f"{type(error).__name__}: {in_a_line(error)}"
        raise AuditError(f"{path} does not run as a module: {why}") from error
    step, given = getattr(module, name, None), getattr(module, f"{name}_args", None)
    if not callable(step):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(inspect.unwrap(value) if callable(value) else value)
            and value.__module__ == module.__name__
        ]
        raise AuditError(f"{path}: has no function {name!r}; it has {', '.join(functions[:8]) or 'none'}")
    if inspect.isfunction(given):
        given = given()
    if not isinstance(given, tuple):
        raise AuditError(
            f"{path}: the arguments of {name} are not known; write {name}_args = (params, batch), of "
            "arrays or jax.ShapeDtypeStruct(shape, dtype, sharding=...), or a function of that name that "
            "returns them"
        )
    import jax

    mesh = next((key for key, value in vars(module).items() if isinstance(value, jax.sharding.Mesh)), "")
    return step if hasattr(step, "lower") else jax.jit(step), given, mesh


def seconds_by_line(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`where`, `seconds`, `bytes` and `collectives` of each source line, the slowest first."""
    lines: dict[str, dict[str, Any]] = {}
    for sent in document["emitted"]:
        where = sent.get("where") or "not known"
        line = lines.setdefault(where, {"where": where, "seconds": 0.0, "bytes": 0, "collectives": []})
        times = sent["count"] or 1
        line["seconds"] += sent["seconds"] or 0.0
        line["bytes"] += sent["bytes"] * times
        line["collectives"].append(f"{sent['op']} over {'·'.join(sent['axes']) or 'groups'}")
    return sorted(lines.values(), key=lambda line: (-line["seconds"], -line["bytes"]))


def patch(document: Mapping[str, Any], script: Path, mesh: str = "") -> str:
    """A unified diff of the files with findings.

    It constrains the product on a finding's line, or writes the change as a comment above the line if a
    constraint does not help. mesh: the script's name of its mesh, which other files do not know. The axes
    are the axes of the finding's collective; the first dimension is taken for the batch, and the others stay
    as they are.
    """
    axes_of = {sent["instruction"]: tuple(sent["axes"]) for sent in document["emitted"]}
    places: dict[Path, dict[int, tuple[Mapping[str, Any], tuple[str, ...]]]] = {}
    for finding in document["warnings"]:
        place = _PLACE.search(finding["where"])
        if place and (path := Path(place[1])).is_file():
            places.setdefault(path, {}).setdefault(
                int(place[2]), (finding, axes_of.get(finding["instruction"], ()))
            )
    diffs: list[str] = []
    for path, lines in places.items():
        before = read_text(path, AuditError).splitlines()
        after = _patched(before, lines, mesh if path.samefile(script) else "")
        diffs += difflib.unified_diff(before, after, f"a/{path.name}", f"b/{path.name}", lineterm="")
    return "".join(f"{line}\n" for line in diffs)


def _patched(
    before: Sequence[str], lines: Mapping[int, tuple[Mapping[str, Any], tuple[str, ...]]], mesh: str
) -> list[str]:
    """The lines of a file with its products constrained, and a function that constrains them.

    lines: by number, each finding with the axes of its collective. The first constrained product decides the
    axes of the function; products over other axes get a comment.
    """
    tree = ast.parse("\n".join(before))
    after, helper_axes, first = dict(enumerate(before, start=1)), (), len(before)
    for number, (finding, axes) in lines.items():
        line = after.get(number, "")
        columns = _product(tree, number)
        has_other_axes = helper_axes not in ((), axes)
        if columns is None or not axes or finding["kind"] not in _CONSTRAINED or has_other_axes:
            indent = line[: len(line) - len(line.lstrip())]
            after[number] = f"{indent}# {finding['kind']}: {finding['change']}\n{line}"
            continue
        # The parser counts columns in bytes of UTF-8.
        start, end = (len(line.encode()[:column].decode()) for column in columns)
        after[number] = f"{line[:start]}{_HELPER}({line[start:end]}){line[end:]}"
        helper_axes, first = axes, min(first, _first_line_of_statement(tree, number))
    if helper_axes:
        kind, batch = "jax.sharding.PartitionSpec", ", ".join(map(repr, helper_axes))
        spec = f"{kind}({batch if len(helper_axes) == 1 else f'({batch})'}, *others)"
        placed = f"jax.sharding.NamedSharding({mesh}, {spec})" if mesh else spec
        helper = [
            f"def {_HELPER}(x):",
            f"    others = [{kind}.UNCONSTRAINED] * (x.ndim - 1)",
            f"    return jax.lax.with_sharding_constraint(x, {placed})",
            "",
            "",
        ]
        after[first] = "\n".join([*helper, after[first]])
    return "\n".join(after.values()).splitlines()


def _product(tree: ast.Module, number: int) -> tuple[int, int] | None:
    """The columns, in bytes, of the outermost matrix product on a single line; None without one."""
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) != number or getattr(node, "end_lineno", 0) != number:
            continue
        is_operator = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _PRODUCTS
        if is_operator or is_call:
            assert isinstance(node, ast.expr) and node.end_col_offset is not None
            return node.col_offset, node.end_col_offset
    return None


def _first_line_of_statement(tree: ast.Module, number: int) -> int:
    """The first line of the module's statement that contains a line, with its decorators."""
    for node in tree.body:
        if node.lineno <= number <= (node.end_lineno or node.lineno):
            decorators = getattr(node, "decorator_list", [])
            return min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return number
