"""Assertions for tests of your own programs: their collectives, pinned in the notation.

def test_the_layer_gathers_each_weight_once():
    assert_collectives(jax.jit(layer), weights, x, expected={"AllGather_fsdp": 2, "AllReduce_tensor": 1})
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshwright.audit.checks import check_bounds, parse_bound
from meshwright.audit.facts.emitted import NEGLIGIBLE_BYTES, Emitted
from meshwright.audit.facts.gaps import not_understood
from meshwright.audit.foreign import compiled_ahead, compiled_program, machine_of, read_program
from meshwright.notation.collective import TITLES
from meshwright.notation.mesh import Mesh


def assert_collectives(
    jitted: Callable[..., Any],
    *args: Any,
    expected: Mapping[str, int] | Iterable[str] | None = None,
    bounds: Iterable[str] = (),
    hardware: str | None = None,
    negligible_bytes: int = NEGLIGIBLE_BYTES,
    **kwargs: Any,
) -> None:
    """Passes if `jitted(*args, **kwargs)` compiles to exactly the collectives `expected`; it is not run.

    expected: how often each runs in a step, loops multiplied in; a list names each run once.
        AllGather_fsdp                over one mesh axis
        AllReduce_{data,fsdp}         over several, in any order
        ReduceScatter_fsdp w_in       of one tensor: the program's input that is sent, as JAX names it,
                                      else the innermost named scope
    A sum of which each device keeps its slice is a ReduceScatter, whatever the compiler calls it.
    bounds: what it may move at most, such as `at most 100 MB over data`, `nothing over dcn` and `no gather of
    w_*` (see `audit.bounds`), beside the expected or in place of them.
    hardware: compile ahead of time for these chips, such as `v5p:4x4x4` or `h100:8x8`, of which none need be
    attached, in place of the devices of the arguments (see `audit.jitted.compiled_ahead`).
    negligible_bytes: sums of a few numbers, up to so many bytes, are left out.
    Raises AssertionError that shows the lines that differ, and what of the program was not understood;
    AuditError where it does not compile or the words of a bound are not understood.
    """
    limits = [parse_bound(text) for text in ([bounds] if isinstance(bounds, str) else bounds)]
    if expected is None and not limits:
        raise ValueError("assert_collectives: name what is expected=, or bounds=")
    wanted = None if expected is None else _counted(expected)
    if hardware:
        program, mesh = compiled_ahead(jitted, hardware, *args, **kwargs)
    else:
        program, mesh = compiled_program(jitted, *args, **kwargs)
    machine = machine_of(hardware, program.num_devices) if hardware else None
    reading = read_program(program, machine, mesh)
    sent = [one for one in reading.sent if one.collective.gathered_bytes > negligible_bytes]
    problems = [] if wanted is None else _not_expected(wanted, sent, mesh)
    problems += [f"  ! {line}" for line in check_bounds(limits, sent, reading.prices)]
    problems += map(_gap, not_understood(program))
    if problems:
        raise AssertionError("\n".join([_TITLE, *problems]))


_TITLE = "the program's collectives are not the expected ones (- expected, + emitted, ! over a bound):"


def _counted(expected: Mapping[str, int] | Iterable[str]) -> Counter[str]:
    wanted = Counter(dict(expected) if isinstance(expected, Mapping) else Counter(expected))
    return Counter({_normal(name): count for name, count in wanted.items() if count})


def _not_expected(wanted: Counter[str], sent: Iterable[Emitted], mesh: Mesh | None) -> list[str]:
    """The lines of both sides, if they differ. Raises ValueError for an axis that the mesh lacks."""
    _check_axes(wanted, mesh)
    found: dict[str, list[Emitted]] = {}
    for one in sent:
        for name in _names(one):
            named = f"{name} {one.tensor}"
            found.setdefault(named if named in wanted else name, []).append(one)
    counts = Counter({name: sum(one.runs for one in several) for name, several in found.items()})
    return [] if counts == wanted else _difference(wanted, counts, found)


def _names(one: Emitted) -> list[str]:
    """The collective in the notation; two where an all-reduce keeps the slices of some of its axes."""
    e = one
    if e.op != "all_reduce" or not e.kept:
        return [_name(e.op, e.axes)]
    rest = [axis for axis in e.axes if axis not in e.kept]
    return [_name("reduce_scatter", e.kept), *([_name("all_reduce", rest)] if rest else [])]


def _name(op: str, axes: Iterable[str]) -> str:
    names = sorted(axes)
    over = names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
    return f"{TITLES[op]}_{over}"


def _normal(name: str) -> str:
    """`name` with its axes sorted. Raises ValueError for what is no collective."""
    title, _, tensor = name.strip().partition(" ")
    op, _, axes = title.partition("_")
    known = {text: op for op, text in TITLES.items()}
    if op not in known or not axes:
        raise ValueError(
            f"{name!r} is not a collective; write AllGather_fsdp, AllReduce_{{data,fsdp}} or AllGather_fsdp w"
        )
    written = _name(known[op], [axis.strip() for axis in axes.strip("{}").split(",")])
    return f"{written} {tensor.strip()}" if tensor.strip() else written


def _check_axes(wanted: Iterable[str], mesh: Mesh | None) -> None:
    for name in wanted:
        title, *_ = name.split(" ")
        for axis in title.partition("_")[2].strip("{}").split(","):
            if mesh and axis not in mesh:
                raise ValueError(f"{name}: the mesh has no axis {axis!r}; it has {', '.join(mesh)}")


def _difference(wanted: Counter[str], counts: Counter[str], found: Mapping[str, list[Emitted]]) -> list[str]:
    """Every line, those that differ marked: - expected, + emitted with the tensors that are sent."""
    lines = []
    for name in sorted({*wanted, *counts}):
        if wanted[name] == counts[name]:
            lines.append(f"    {name}: {wanted[name]}")
            continue
        lines += [f"  - {name}: {wanted[name]}"] if wanted[name] else []
        tensors = ", ".join(dict.fromkeys(one.tensor for one in found.get(name, ())))
        lines += [f"  + {name}: {counts[name]} ({tensors})"] if counts[name] else []
    return lines


def _gap(line: str) -> str:
    return f"  ? not understood: {line}"
