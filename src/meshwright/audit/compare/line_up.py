"""Planned and emitted collectives, joined by tensor and pass.

Gathers are compared with gathers and sums with sums. A row is a match if the bytes of a step are the same on
every axis. It is equivalent if the emitted bytes equal the bytes of a known form of the plan (see
`rewrites`).
Bytes are summed over a step, so that combined and split instructions compare equal. A difference is
negligible if its seconds in a step, over all runs, are few.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from meshwright.audit.compare.rewrites import (
    TOLERANCE,
    RuleCase,
    Side,
    emitted_bytes,
    is_single_number,
    meets,
    planned_bytes,
    reduces_wrongly,
    why_equivalent,
)
from meshwright.audit.facts.emitted import REDUCTIONS, SINGLE_NUMBER, UPDATE, Emitted, pass_of
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.op_names import GRADIENTS, scope_of
from meshwright.cost.collectives import Op
from meshwright.cost.priced import PricedCollective
from meshwright.dtypes import dtype_bytes
from meshwright.models.scopes import input_of
from meshwright.notation.array import Axes

# The scope of the loop over layers. XLA for GPU gives some sums of experts' gradients no other name, since it
# names them by the loop's update.
LAYERS = "layers"
# The statuses of a row that make the verdict `differs`.
DIFFERENT = ("unplanned", "missing", "differs")


@dataclass(frozen=True)
class TensorRow:
    """Planned and emitted collectives of one tensor in one pass.

    status: match, equivalent, unplanned, missing, differs or negligible. note: the reason, in words.
    """

    tensor: str
    direction: str
    planned: tuple[PricedCollective, ...]
    emitted: tuple[Emitted, ...]
    status: str
    note: str = ""


_NO_SIDE = Side()


def line_up(
    planned: Iterable[PricedCollective], emitted: Iterable[Emitted], side: Side = _NO_SIDE
) -> list[TensorRow]:
    """One row for each tensor and pass of either side."""
    planned = tuple(planned)
    planned_by_key: dict[tuple[str, str], list[PricedCollective]] = defaultdict(list)
    for priced in planned:
        planned_by_key[priced.tensor, pass_of(priced.direction)].append(priced)
    emitted_by_key: dict[tuple[str, str], list[Emitted]] = defaultdict(list)
    nameless: list[Emitted] = []
    for collective in emitted:
        key = _key_by_name(collective, planned_by_key)
        if key:
            emitted_by_key[key].append(collective)
        else:
            nameless.append(collective)
    for e in nameless:
        # Any other scope names a tensor that the plan lacks. Only collectives without such a name are matched
        # by size.
        is_named = any(scope != LAYERS for scope in e.collective.scope)
        by_size = None if is_named else _key_by_size(e, planned_by_key, emitted_by_key)
        emitted_by_key[by_size or _key_unplanned(e)].append(e)
    rows = []
    for key in [*planned_by_key, *(key for key in emitted_by_key if key not in planned_by_key)]:
        rows += _rows_of(*key, planned_by_key.get(key, []), emitted_by_key.get(key, []), side)
    return _join_merged(rows)


def _join_merged(rows: list[TensorRow]) -> list[TensorRow]:
    """Mark rows as equivalent whose tensors the compiler sends together under one name.

    A row with too many emitted bytes is joined with missing rows of the same pass if the sum of their plans
    is exactly the emitted bytes. Rows that are near in the plan are tried first.
    """
    rows = list(rows)
    for index, row in enumerate(rows):
        if row.status != "differs":
            continue
        emitted = emitted_bytes(row.emitted)
        missing = [i for i, one in enumerate(rows) if _may_travel_with(one, row, emitted)]
        missing.sort(key=lambda i: abs(i - index))
        merged = next(
            (
                some
                for count in range(1, min(len(missing), _MOST_TOGETHER) + 1)
                for some in combinations(missing, count)
                if meets(emitted, planned_bytes(p for i in (index, *some) for p in rows[i].planned))
            ),
            (),
        )
        for i in merged:
            rows[i] = replace(rows[i], status="equivalent", note=f"sent together with {row.tensor}")
        if merged:
            names = ", ".join(rows[i].tensor for i in merged)
            rows[index] = replace(row, status="equivalent", note=f"sent together with {names}")
    return rows


_MOST_TOGETHER = 3


def _may_travel_with(other: TensorRow, row: TensorRow, emitted: Counter) -> bool:
    same = other.status == "missing" and other.direction == row.direction
    return same and planned_bytes(other.planned).keys() <= emitted.keys()


def _key_by_name(
    emitted: Emitted, planned: Mapping[tuple[str, str], list[PricedCollective]]
) -> tuple[str, str] | None:
    """The planned tensor that a scope of `emitted` names; the most similar one of several.

    A projection's scope holds two sums: its weight's gradient and its input's gradient, planned once for all
    projections of that input (`to_wq+wk+wv`). Collectives in the scope `gradients` belong to the weight.
    """
    phase, scopes = pass_of(emitted.collective.phase), emitted.collective.scope
    candidates = [(tensor, phase) for tensor, when in planned if when == phase and _covers(tensor, scopes)]
    if GRADIENTS in scopes:
        candidates = [key for key in candidates if key[0] in scopes] or candidates
    return max(candidates, key=lambda key: _likeness(emitted, planned[key]), default=None)


def _key_unplanned(emitted: Emitted) -> tuple[str, str]:
    """The tensor that an unplanned collective names.

    This is its innermost scope, its operand's innermost scope, or the program's input that it sends.
    """
    c, phase = emitted.collective, pass_of(emitted.collective.phase)
    scopes = [scope for scope in (*scope_of(c.operand_op_name), *c.scope) if scope != UPDATE]
    if phase == UPDATE and not scopes and not c.parameter and emitted.num_bytes <= SINGLE_NUMBER:
        return "grad_norm", phase
    return (scopes[-1] if scopes else c.parameter or c.primitive), phase


def _key_by_size(
    wanted: Emitted,
    planned: Mapping[tuple[str, str], list[PricedCollective]],
    emitted: Mapping[tuple[str, str], list[Emitted]],
) -> tuple[str, str] | None:
    """A planned tensor that still lacks a collective of the same kind and size.

    Used for compilers that drop JAX's names. A tensor with the name of the sent input comes first.
    """

    def lacks(key: tuple[str, str]) -> bool:
        same = [p for p in planned[key] if _kind(p.op, p.axes, p.gathered_bytes) == kind]
        had = [e.runs for e in emitted.get(key, ()) if _kind(e.op, e.axes, e.gathered_bytes) == kind]
        return sum(p.count for p in same) - sum(had) >= (wanted.runs)

    kind = _kind(wanted.op, wanted.axes, wanted.gathered_bytes)
    candidates = [key for key in planned if lacks(key)]
    parameter = wanted.collective.parameter or ""
    return max(candidates, key=lambda key: f"['{key[0]}']" in parameter, default=None)


def _kind(op: Op, axes: Axes, size: int) -> tuple[Op, frozenset[str], int]:
    return op, frozenset(axes), size


def _covers(tensor: str, scopes: tuple[str, ...]) -> bool:
    """Whether a scope names `tensor`, or a weight of the shared input `tensor` (`input_of`)."""
    shared = tensor.removeprefix(input_of("")).split("+") if tensor.startswith(input_of("")) else ()
    return any(scope == tensor or scope in shared for scope in scopes)


def _likeness(emitted: Emitted, planned: list[PricedCollective]) -> tuple[bool, bool, int]:
    reduces = emitted.reduces
    similar = [p for p in planned if (p.op in REDUCTIONS) == reduces]
    axes = {axis for p in similar for axis in p.axes}
    sizes = {p.gathered_bytes for p in similar}
    return bool(axes & set(emitted.axes)), emitted.gathered_bytes in sizes, len(axes & set(emitted.axes))


def _rows_of(
    tensor: str,
    phase: str,
    planned: list[PricedCollective],
    emitted: list[Emitted],
    side: Side,
) -> list[TensorRow]:
    """One row for the gathers and one for the sums of a tensor in one pass."""
    rows = []
    for reduces in (False, True):
        plans = [p for p in planned if (p.op in REDUCTIONS) == reduces]
        actual = [e for e in emitted if e.reduces == reduces]
        if plans or actual:
            rows.append(_judge(tensor, phase, tuple(plans), tuple(actual), side))
    return rows


def _judge(
    tensor: str, phase: str, planned: tuple[PricedCollective, ...], emitted: tuple[Emitted, ...], side: Side
) -> TensorRow:
    def row(status: str, note: str = "") -> TensorRow:
        return TensorRow(tensor, phase, planned, emitted, status, note)

    note = why_equivalent(RuleCase(planned, emitted, side))
    if note is not None:
        return row("equivalent", note) if note else row("match")
    if not planned:
        return row("unplanned", _unplanned_note(emitted))
    if not emitted:
        return row("missing", "planned, but not in the compiled program")
    return row("differs", _difference(planned, emitted))


def _difference(planned: tuple[PricedCollective, ...], emitted: tuple[Emitted, ...]) -> str:
    plan = ", ".join(sorted({f"{p.op} over {'·'.join(p.axes)}" for p in planned}))
    actual = ", ".join(sorted({f"{_form(e)} over {'·'.join(e.axes) or 'no mesh axes'}" for e in emitted}))
    planned_bytes = sum(p.step_bytes for p in planned)
    actual_bytes = sum(e.gathered_per_step for e in emitted)
    return f"planned {plan} ({planned_bytes:,} B a step), emitted {actual} ({actual_bytes:,} B a step)"


def _form(e: Emitted) -> str:
    return f"{e.op} (of zero-padded shards)" if e.collective.gathers else e.op


def _unplanned_note(emitted: tuple[Emitted, ...]) -> str:
    first = emitted[0]
    where = first.collective.op_name or first.collective.name
    return f"{where}: {first.note}" if first.note else where


def summed_whole(row: TensorRow) -> tuple[str, str] | None:
    """(what, change) if an all-reduce replaces an all-gather or a reduce-scatter; otherwise None.

    what: the difference in words. change: advice; "" if there is none.
    """
    sums = [e for e in row.emitted if e.collective.op == "all_reduce"]
    gathered = {axis for e in sums if e.collective.gathers for axis in e.axes}
    if gathered:
        return (
            f"{row.tensor}: the all-gather over {_joined(gathered)} is compiled to an all-reduce of "
            "zero-padded shards, which sends twice the bytes",
            "use a smaller fsdp axis and a second axis (data=4,fsdp=16 in place of fsdp=64): there "
            "XLA:TPU emits all-gathers",
        )
    planned = {axis for p in row.planned if p.op == "reduce_scatter" for axis in p.axes}
    scattered = {axis for e in row.emitted if e.op == "reduce_scatter" for axis in e.axes}
    whole = {axis for e in sums for axis in e.axes} & planned - scattered
    if not whole:
        return None
    rings = _round_rings(e for e in sums if whole.intersection(e.axes))
    cure = (
        f"reshape the scattered dimension to [{_joined(whole)}, rest] before the sum, so that a device keeps "
        "one index of it: XLA then emits a reduce-scatter"
    )
    return (
        f"{row.tensor}: the plan has a reduce-scatter over {_joined(whole)}, the compiler emits an "
        f"all-reduce of which each device keeps a slice: twice the bytes{rings}",
        "" if rings else cure,
    )


def _round_rings(sums: Iterable[Emitted]) -> str:
    """The rings that an all-reduce uses at once, and its time; "" for at most two.

    An all-reduce of V bytes over k directed rings takes 2V / (k w), with w a link's bytes/s in one direction.
    A reduce-scatter of libtpu 0.0.42 uses one ring in both directions: V / (2 w).
    """
    rings = min((e.collective.num_rings or 1 for e in sums), default=1)
    if rings <= 2:
        return ""
    return (
        f", but over {rings} rings at once, in {4 / rings:.0%} of the time of a reduce-scatter over one ring"
    )


def _joined(axes: Iterable[str]) -> str:
    return "·".join(sorted(axes))


# Limits on all negligible differences together: a share of the planned step, and seconds.
NEGLIGIBLE_SHARE = 1e-3
NEGLIGIBLE_SECONDS = 5e-4


def weighed(rows: Sequence[TensorRow], prices: Prices, step_seconds: float) -> list[TensorRow]:
    """The rows, with status `negligible` for differences that cost little.

    Never negligible are gathers over fewer axes than planned, sums over other axes, and planned collectives
    that are missing: the numbers change. An exception is the sum of a single number that the program does
    under another name.
    """
    limit = min(NEGLIGIBLE_SHARE * step_seconds, NEGLIGIBLE_SECONDS)
    small: dict[int, float] = {}
    spare = _spare_axes(rows)
    for seconds, i in sorted((_small(row, prices, spare), i) for i, row in enumerate(rows)):
        if sum(small.values()) + seconds <= limit:
            small[i] = seconds
    return [_negligible(row, small[i]) if i in small else row for i, row in enumerate(rows)]


def extra_seconds(row: TensorRow, prices: Prices) -> float | None:
    """Seconds a step beyond the planned, hidden or not.

    None if the groups of an emitted collective follow no mesh axes.
    """
    seconds = prices.total_seconds(row.emitted)
    return None if seconds is None else seconds - sum(p.step_seconds for p in row.planned)


def _spare_axes(rows: Iterable[TensorRow]) -> set[str]:
    """The axes with more sums of single numbers in `rows` than planned."""
    spare: set[str] = set()
    for row in rows:
        sums = [e for e in row.emitted if e.op == "all_reduce" and e.num_bytes <= SINGLE_NUMBER]
        planned = [p for p in row.planned if is_single_number(p)]
        if sum(e.runs for e in sums) > sum(p.count for p in planned):
            spare |= _axes(sums)
    return spare


def _small(row: TensorRow, prices: Prices, spare: set[str]) -> float:
    """The seconds of a difference that may be negligible; infinite if it may not.

    spare: axes with unplanned sums of single numbers in other rows.
    """
    seconds = extra_seconds(row, prices) if row.status in DIFFERENT else None
    if seconds is None:
        return float("inf")
    planned, emitted = _axes(row.planned), _axes(row.emitted)
    if all(map(is_single_number, row.planned)):  # also if nothing is planned
        if not planned <= emitted | spare:
            return float("inf")
        return abs(seconds) if row.emitted else 0.0
    sums = [e for e in row.emitted if e.reduces and not e.collective.follows_sum]
    sums_others = bool(sums) and (
        _axes(sums) != planned
        or _numbers(sums) < _planned_numbers(row.planned)
        or reduces_wrongly(row.planned, sums)
    )
    gathers = any(p.op == "all_gather" for p in row.planned)
    gathered = any(e.op in ("all_gather", "permute") for e in row.emitted)
    is_summed = any(p.op in ("all_reduce", "reduce_scatter") for p in row.planned)
    if is_summed and not any(e.reduces for e in row.emitted):
        return float("inf")
    if sums_others or not planned <= emitted or gathers > gathered:
        return float("inf")
    # The whole tensor is summed by another collective, so taking less time than planned is no fault.
    return max(0.0, seconds) if summed_whole(row) else abs(seconds)


def _numbers(sums: Iterable[Emitted]) -> float:
    """Numbers summed in a step."""
    return sum(e.elements * e.runs for e in sums)


def _planned_numbers(planned: Iterable[PricedCollective]) -> float:
    """Planned numbers of gradients, less the tolerance.

    Other sums do not count, because XLA for TPU may name only a part of them.
    """
    gradients = (p for p in planned if p.what == "gradients")
    return (1 - TOLERANCE) * sum(p.step_bytes / dtype_bytes(p.dtype) for p in gradients)


def _axes(side: Iterable) -> set[str]:
    return {axis for one in side for axis in one.axes}


def _negligible(row: TensorRow, seconds: float) -> TensorRow:
    what = summed_whole(row)
    return replace(
        row, status="negligible", note=f"{seconds * 1e6:.1f} us a step: {what[0] if what else row.note}"
    )
