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
    """Assert that `jitted(*args, **kwargs)` compiles to exactly the expected collectives.

    The program is compiled and not run.
    expected: the number of runs of each collective in a step, loops included; a list has an item for each
    run.
        AllGather_fsdp                over one mesh axis
        AllReduce_{data,fsdp}         over several, in any order
        ReduceScatter_fsdp w_in       of one tensor: the program's input that is sent, as JAX names it,
                                      or the innermost named scope if no input is sent
    A sum that leaves each device with its slice is a ReduceScatter, even if the compiler emits an AllReduce.
    bounds: limits of the communication, in addition to `expected` or instead of it, such as `at most 100 MB
    over data`, `nothing over dcn` and `no gather of w_*` (see `audit.checks`).
    hardware: compile ahead of time for the named chips, such as `v5p:4x4x4` or `h100:8x8`, instead of for the
    devices of the arguments; no such chip needs to be attached (see `audit.foreign.compiled_ahead`).
    negligible_bytes: collectives of at most this size are ignored.
    Raises AssertionError with the lines that differ, and with parts of the program that were not understood;
    AuditError if the program does not compile or a bound is not understood.
    """
    limits = [parse_bound(text) for text in ([bounds] if isinstance(bounds, str) else bounds)]
    if expected is None and not limits:
        raise ValueError("assert_collectives: give expected=, bounds= or both")
    wanted = None if expected is None else _counted(expected)
    if hardware:
        program, mesh = compiled_ahead(jitted, hardware, *args, **kwargs)
    else:
        program, mesh = compiled_program(jitted, *args, **kwargs)
    machine = machine_of(hardware, program.num_devices) if hardware else None
    reading = read_program(program, machine, mesh)
    sent = [emitted for emitted in reading.sent if emitted.collective.gathered_bytes > negligible_bytes]
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
    by_name: dict[str, list[Emitted]] = {}
    for emitted in sent:
        for name in _names(emitted):
            of_tensor = f"{name} {emitted.tensor}"
            by_name.setdefault(of_tensor if of_tensor in wanted else name, []).append(emitted)
    counts = Counter({name: sum(emitted.runs for emitted in several) for name, several in by_name.items()})
    return [] if counts == wanted else _difference(wanted, counts, by_name)


def _names(emitted: Emitted) -> list[str]:
    """The collective in the notation; two if an all-reduce keeps the slices of some of its axes."""
    if emitted.op != "all_reduce" or not emitted.kept:
        return [_name(emitted.op, emitted.axes)]
    rest = [axis for axis in emitted.axes if axis not in emitted.kept]
    return [_name("reduce_scatter", emitted.kept), *([_name("all_reduce", rest)] if rest else [])]


def _name(op: str, axes: Iterable[str]) -> str:
    names = sorted(axes)
    over = names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
    return f"{TITLES[op]}_{over}"


def _normal(name: str) -> str:
    """`name` with its axes sorted. Raises ValueError if it is not a collective."""
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


def _difference(
    wanted: Counter[str], counts: Counter[str], by_name: Mapping[str, list[Emitted]]
) -> list[str]:
    """All lines, with marks at differences: - expected, + emitted with the tensors that are sent."""
    lines = []
    for name in sorted({*wanted, *counts}):
        if wanted[name] == counts[name]:
            lines.append(f"    {name}: {wanted[name]}")
            continue
        lines += [f"  - {name}: {wanted[name]}"] if wanted[name] else []
        tensors = ", ".join(dict.fromkeys(emitted.tensor for emitted in by_name.get(name, ())))
        lines += [f"  + {name}: {counts[name]} ({tensors})"] if counts[name] else []
    return lines


def _gap(line: str) -> str:
    return f"  ? not understood: {line}"
