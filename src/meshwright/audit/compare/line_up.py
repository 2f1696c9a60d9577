"""Lines up the planned collectives with those that the compiler emitted.

Both sides are joined per tensor and pass by what they mean: gathers over axes, or sums over axes.
An all-reduce over data and fsdp of which each device keeps its own fsdp slice is what XLA:CPU
makes of a planned reduce-scatter and all-reduce; there it is equivalent, and said so. A compiler
that has a reduce-scatter did not use it then: twice the bytes, so the program differs. So it does
where it gathers by a sum of shards in zeros. Bytes are summed over a step, so that combined or split
instructions compare.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from meshwright.audit.facts.emitted import NEGLIGIBLE_BYTES, REDUCTIONS, Emitted, pass_of
from meshwright.cost.collectives import Op
from meshwright.cost.priced import PricedCollective
from meshwright.models.transformer import input_of
from meshwright.notation.array import Axes
from meshwright.units import dtype_bytes

# The statuses of a row that make the verdict `differs`.
DIFFERENT = ("unplanned", "missing", "differs")


@dataclass(frozen=True)
class Row:
    """One tensor in one pass: what was planned beside what was emitted.

    status: match, equivalent, unplanned, missing, differs or negligible. note: why, in words.
    """

    tensor: str
    direction: str
    planned: tuple[PricedCollective, ...]
    emitted: tuple[Emitted, ...]
    status: str
    note: str = ""


def line_up(
    planned: Iterable[PricedCollective], emitted: Iterable[Emitted], *, has_reduce_scatter: bool = False
) -> list[Row]:
    """One row for each tensor and pass that either side knows.

    has_reduce_scatter: the compiler can emit one, so a sum that does the work of one, or of a gather,
    is another thing.
    """
    planned_by_key: dict[tuple[str, str], list[PricedCollective]] = defaultdict(list)
    for one in planned:
        planned_by_key[one.tensor, pass_of(one.direction)].append(one)
    emitted_by_key: dict[tuple[str, str], list[Emitted]] = defaultdict(list)
    nameless: list[Emitted] = []
    for found in emitted:
        key = _key_by_name(found, planned_by_key)
        if key:
            emitted_by_key[key].append(found)
        else:
            nameless.append(found)
    for found in nameless:
        # What has a name of its own is nobody else's.
        by_size = None if found.collective.scope else _key_by_size(found, planned_by_key, emitted_by_key)
        emitted_by_key[by_size or _key_unplanned(found)].append(found)
    rows = []
    for key in [*planned_by_key, *(key for key in emitted_by_key if key not in planned_by_key)]:
        found = emitted_by_key.get(key, [])
        rows += _rows_of(*key, planned_by_key.get(key, []), found, has_reduce_scatter)
    return _told_together(rows)


def _told_together(rows: list[Row]) -> list[Row]:
    """Rows of tensors that travel as one: a compiler that merges products or sums names one of them.

    A tensor for which too much was emitted and those of the same pass that are missing are equivalent
    where their plans together are exactly what was emitted; the nearest such ones in the plan.
    """
    rows = list(rows)
    for index, row in enumerate(rows):
        if row.status != "differs":
            continue
        emitted = emitted_bytes(row.emitted)
        missing = [i for i, one in enumerate(rows) if _may_travel_with(one, row, emitted)]
        missing.sort(key=lambda i: abs(i - index))
        found = next(
            (
                some
                for count in range(1, min(len(missing), _MOST_TOGETHER) + 1)
                for some in combinations(missing, count)
                if planned_bytes(p for i in (index, *some) for p in rows[i].planned) == emitted
            ),
            (),
        )
        for i in found:
            rows[i] = replace(rows[i], status="equivalent", note=f"sent together with {row.tensor}")
        if found:
            names = ", ".join(rows[i].tensor for i in found)
            rows[index] = replace(row, status="equivalent", note=f"sent together with {names}")
    return rows


_MOST_TOGETHER = 3


def _may_travel_with(one: Row, row: Row, emitted: Counter) -> bool:
    same = one.status == "missing" and one.direction == row.direction
    return same and planned_bytes(one.planned).keys() <= emitted.keys()


def _key_by_name(
    found: Emitted, planned: Mapping[tuple[str, str], list[PricedCollective]]
) -> tuple[str, str] | None:
    """The planned tensor that `found` moves: one of its scopes whose plan is most like it.

    A projection's scope holds two tensors' sums: its weight's gradient and its input's, which is
    planned once for all (`to_wq+wk+wv`).
    """
    phase, scopes = pass_of(found.collective.phase), found.collective.scope
    candidates = [(tensor, phase) for tensor, when in planned if when == phase and _covers(tensor, scopes)]
    return max(candidates, key=lambda key: _likeness(found, planned[key]), default=None)


def _key_unplanned(found: Emitted) -> tuple[str, str]:
    phase, scopes = pass_of(found.collective.phase), found.collective.scope
    if phase == "update":
        return "grad_norm", "update"
    return (scopes[-1] if scopes else found.collective.primitive, phase)


def _key_by_size(
    found: Emitted,
    planned: Mapping[tuple[str, str], list[PricedCollective]],
    emitted: Mapping[tuple[str, str], list[Emitted]],
) -> tuple[str, str] | None:
    """The planned tensor that lacks just such a collective: for compilers that drop JAX's names.

    The program's input that is sent, where it is one, has the tensor's name.
    """

    def lacks(key: tuple[str, str]) -> bool:
        same = [p for p in planned[key] if _kind(p.op, p.axes, p.gathered_bytes) == kind]
        had = [
            e.collective.count or 1
            for e in emitted.get(key, ())
            if _kind(e.op, e.axes, e.collective.source_bytes) == kind
        ]
        return sum(p.count for p in same) - sum(had) >= (found.collective.count or 1)

    kind = _kind(found.op, found.axes, found.collective.source_bytes)
    candidates = [key for key in planned if lacks(key)]
    parameter = found.collective.parameter or ""
    return max(candidates, key=lambda key: f"['{key[0]}']" in parameter, default=None)


def _kind(op: Op, axes: Axes, size: int) -> tuple[Op, frozenset[str], int]:
    return op, frozenset(axes), size


def _covers(tensor: str, scopes: tuple[str, ...]) -> bool:
    """Whether `tensor` is one of the scopes, or the input that such weights share (`input_of`)."""
    shared = tensor.removeprefix(input_of("")).split("+") if tensor.startswith(input_of("")) else ()
    return any(scope == tensor or scope in shared for scope in scopes)


def _likeness(found: Emitted, planned: list[PricedCollective]) -> tuple[bool, bool, int]:
    reduces = found.reduces
    alike = [p for p in planned if (p.op in REDUCTIONS) == reduces]
    axes = {axis for p in alike for axis in p.axes}
    sizes = {p.gathered_bytes for p in alike}
    return bool(axes & set(found.axes)), found.collective.source_bytes in sizes, len(axes & set(found.axes))


def _rows_of(
    tensor: str,
    phase: str,
    planned: list[PricedCollective],
    emitted: list[Emitted],
    has_reduce_scatter: bool,
) -> list[Row]:
    """Gathers with gathers and sums with sums; an exact pair is a match."""
    rows = []
    for reduces in (False, True):
        plans = [p for p in planned if (p.op in REDUCTIONS) == reduces]
        found = [e for e in emitted if e.reduces == reduces]
        if plans or found:
            rows.append(_judge(tensor, phase, tuple(plans), tuple(found), has_reduce_scatter))
    return rows


def _judge(
    tensor: str,
    phase: str,
    planned: tuple[PricedCollective, ...],
    emitted: tuple[Emitted, ...],
    has_reduce_scatter: bool,
) -> Row:
    def row(status: str, note: str = "") -> Row:
        return Row(tensor, phase, planned, emitted, status, note)

    gathered_as_sum = has_reduce_scatter and any(e.collective.gathers for e in emitted)
    scattered_as_sum = has_reduce_scatter and any(e.op == "all_reduce" and e.kept for e in emitted)
    largest = max([p.gathered_bytes for p in planned] + [e.collective.source_bytes for e in emitted])
    if planned_bytes(planned) == emitted_bytes(emitted) and _joins_all(emitted) and not gathered_as_sum:
        return row("match")
    if largest <= NEGLIGIBLE_BYTES:
        return row("negligible", "sums of single numbers")
    if not planned:
        return row("unplanned", _unplanned_note(emitted))
    if not emitted:
        return row("missing", "planned and not found in the program")
    as_planned = _joins_all(emitted) and not gathered_as_sum and not scattered_as_sum
    if as_planned and (note := _equivalence(planned, emitted)):
        return row("equivalent", note)
    return row("differs", _difference(planned, emitted))


def _joins_all(emitted: tuple[Emitted, ...]) -> bool:
    """Whether steps over parts of axes join all their devices together, as 4 in a slice by 2 slices do 8."""
    steps = [e for e in emitted if not e.collective.follows_sum]
    mesh = next((e.mesh for e in steps if e.is_part), None)
    if mesh is None:
        return True
    groups = [set(group) for one in {e.collective.groups for e in steps} for group in one.members]
    joined = {0}
    while more := {device for group in groups if group & joined for device in group} - joined:
        joined |= more
    return len(joined) == mesh.size(tuple(dict.fromkeys(axis for e in steps for axis in e.axes)))


def planned_bytes(planned: Iterable[PricedCollective]) -> Counter:
    """Bytes a step by operation and axes."""
    total: Counter = Counter()
    for p in planned:
        total[p.op, frozenset(p.axes)] += round(p.step_bytes)
    return total


def emitted_bytes(emitted: Iterable[Emitted]) -> Counter:
    """Bytes a step by operation and axes, in the narrowest type that the numbers had."""
    total: Counter = Counter()
    for e in emitted:
        total[e.op, frozenset(e.axes)] += e.bytes_per_step
    return total


def _equivalence(planned: tuple[PricedCollective, ...], emitted: tuple[Emitted, ...]) -> str:
    """Why what was emitted does what was planned, or "" if it does not.

    The same axes are gathered or summed, the same ones end scattered, and nothing larger than the
    whole planned array moves, counted in the planned type.
    """
    sums = tuple(e for e in emitted if not e.collective.follows_sum)
    if kept := _kept_note(planned, emitted):
        return kept
    if {a for p in planned for a in p.axes} != {a for e in emitted for a in e.axes} or not sums:
        return ""
    notes = [*_type_note(planned, sums), *_padding_note(emitted)]
    scattered = {a for p in planned if p.op == "reduce_scatter" for a in p.axes}
    kept = {a for e in sums for a in (e.axes if e.op == "reduce_scatter" else e.kept)}
    kept -= {a for e in emitted if e.op == "all_gather" and e.collective.follows_sum for a in e.axes}
    elements = _most(((p.op, frozenset(p.axes)), _elements_per_step(p)) for p in planned)
    steps = _most(((e.op, frozenset(e.axes), e.collective.groups), e.elements_per_step) for e in sums)
    if scattered != kept or steps > elements:
        return ""
    if any(e.op == "all_reduce" and e.kept for e in sums):
        notes.append(
            f"an all-reduce of which each device keeps its slice over {'·'.join(sorted(scattered))}: "
            "a reduce-scatter as XLA:CPU writes it, moving more bytes"
        )
    elif any(e.is_part for e in sums):
        notes.append("summed within each slice and across slices")
    elif {p.op for p in planned} != {e.op for e in sums} or len(planned) != len(sums):
        if not sums[0].reduces:
            return ""
        notes.append("the same sums in another order")
    return "; ".join(notes) or "the same sums in another order"


def _elements_per_step(planned: PricedCollective) -> float:
    return planned.step_bytes / dtype_bytes(planned.dtype)


def _most(elements: Iterable[tuple[object, float]]) -> float:
    """Elements a step of what moves most, an operation over some devices, of all layers together."""
    total: dict[object, float] = defaultdict(float)
    for over, count in elements:
        total[over] += count
    return max(total.values())


def _kept_note(planned: tuple[PricedCollective, ...], emitted: tuple[Emitted, ...]) -> str:
    """What a compiler says that moves a gather out of the loop over the microbatches, or ""."""
    wanted, found = planned_bytes(planned), emitted_bytes(emitted)
    sizes = {p.gathered_bytes for p in planned}
    alike = wanted.keys() == found.keys() and {op for op, _ in found} == {"all_gather"}
    whole = {e.collective.source_bytes for e in emitted} <= sizes
    total_planned, total_found = wanted.total(), found.total()
    if not (alike and whole) or not total_found < total_planned or total_planned % total_found:
        return ""
    return f"gathered once and kept for {total_planned // total_found:.0f} uses: fewer bytes, more memory"


def _type_note(planned: tuple[PricedCollective, ...], emitted: tuple[Emitted, ...]) -> list[str]:
    wanted = planned[0].dtype
    others = [e.collective.source_dtype for e in emitted if e.collective.source_dtype != wanted]
    return [f"sent as {others[0]} where {wanted} was planned"] if others else []


def _padding_note(emitted: tuple[Emitted, ...]) -> list[str]:
    """What a padded reduce-scatter sends beside the array."""
    if not any(e.collective.padding_bytes for e in emitted):
        return []
    whole = sum(e.bytes_per_step for e in emitted if not e.collective.follows_sum)
    padding = sum(e.collective.padding_bytes * (e.collective.count or 1) for e in emitted)
    moved = sum(e.bytes_per_step for e in emitted if e.op == "permute" and e.collective.follows_sum)
    then = f", then {moved:,} B a step permuted to where they belong" if moved else ""
    return [f"padded by {padding / whole:.1%} to whole tiles{then}"]


def _difference(planned: tuple[PricedCollective, ...], emitted: tuple[Emitted, ...]) -> str:
    plan = ", ".join(sorted({f"{p.op} over {'·'.join(p.axes)}" for p in planned}))
    found = ", ".join(sorted({f"{_form(e)} over {'·'.join(e.axes) or 'no mesh axes'}" for e in emitted}))
    planned_bytes = sum(p.step_bytes for p in planned)
    found_bytes = sum(e.bytes_per_step for e in emitted)
    return f"planned {plan} ({planned_bytes:,} B a step), emitted {found} ({found_bytes:,} B a step)"


def _form(e: Emitted) -> str:
    return f"{e.op} (a sum of shards in zeros)" if e.collective.gathers else e.op


def _unplanned_note(emitted: tuple[Emitted, ...]) -> str:
    first = emitted[0]
    where = first.collective.op_name or first.collective.name
    return f"{where}: {first.note}" if first.note else where
