"""Equivalent forms of planned collectives: named rules that predict the bytes of each form.

A row has the planned and the emitted collectives of one tensor in one pass, as bytes per step by operation
and mesh axes. A rule whose form appears among the emitted collectives rewrites the expected bytes. After all
rules, expected and emitted bytes must agree on every axis within TOLERANCE.

    scattered_sums  XLA:CPU has no reduce-scatter: an all-reduce, then each device keeps its slice
    tied            a table with two uses: gathered once, its gradients added before their sum
    kept_gathers    a weight gathered once for all microbatches, and kept
    joined          collectives over X, then over Y, of one array: at once over X and Y
    one_by_one      a number summed over X, then over Y, instead of at once; on CPUs a vector, too
    lookups         XLA:CPU looks up and scatters rows of 16-bit tables in float32
    narrowed        gradients of norms, summed in float32, are sent in the type of the result
    sums_apart      a number of each weight is summed instead of the norm's; on CPUs each separately
    rings           a gather or scatter in steps: permutes of blocks round a ring
    padded          a reduce-scatter padded to whole tiles; permutes return its slices to their owners
    across_slices   a sum within each slice, then across
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import NamedTuple, Protocol

from meshwright.audit.facts.emitted import REDUCTIONS, SINGLE_NUMBER, Emitted
from meshwright.audit.hlo.op_names import primitive_of
from meshwright.dtypes import dtype_bytes
from meshwright.notation.array import Axes

# The accepted difference of emitted bytes from expected bytes on any axis, as a share. Rules are exact except
# for the tiles that a compiler fills.
TOLERANCE = 0.005

# Primitives of a look-up in JAX: rows are taken, rows of other shards are masked; and its transpose.
_LOOKUPS = ("gather", "select_n", "scatter-add", "scatter")

_Key = tuple[str, frozenset[str]]


@dataclass(frozen=True)
class Side:
    """Facts about the compiler and the plan that rules need in addition to a row.

    has_reduce_scatter: the compiler can emit one; XLA:CPU cannot, and widens the rows that it looks up.
    num_passes: forward runs of a layer in a step. num_loops: loops of the program that hold these runs.
    split_weights: number of gradients that each axis splits. gradients_dtype: their type.
    """

    has_reduce_scatter: bool = False
    num_microbatches: int = 1
    num_passes: int = 1
    num_loops: int = 1
    split_weights: Mapping[str, int] = field(default_factory=dict)
    gradients_dtype: str = "f32"


class PlannedCollective(Protocol):
    """Attributes that rules read from a planned (`PricedCollective`) or derived collective.

    gathered_bytes: V of one run, in `dtype`. count: runs per step. step_bytes: V of all runs.
    """

    @property
    def op(self) -> str: ...
    @property
    def axes(self) -> Axes: ...
    @property
    def tensor(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def gathered_bytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def count(self) -> float: ...
    @property
    def step_bytes(self) -> float: ...


class RuleCase(NamedTuple):
    planned: tuple[PlannedCollective, ...]
    emitted: tuple[Emitted, ...]
    side: Side


Rewritten = tuple[Counter[_Key], str]
_Rule = Callable[[Counter[_Key], RuleCase], Rewritten | None]


def planned_bytes(planned: Iterable[PlannedCollective]) -> Counter[_Key]:
    """Bytes a step by operation and axes."""
    total: Counter[_Key] = Counter()
    for p in planned:
        total[p.op, frozenset(p.axes)] += round(p.step_bytes)
    return total


def emitted_bytes(emitted: Iterable[Emitted]) -> Counter[_Key]:
    """Bytes a step by operation and axes, in the sent type.

    Collectives that return the slices of a sum to their owners do not count.
    """
    total: Counter[_Key] = Counter()
    for e in emitted:
        if not e.collective.follows_sum:
            total[e.op, frozenset(e.axes)] += e.gathered_per_step
    return total


def meets(emitted: Counter[_Key], expected: Counter[_Key]) -> bool:
    """Whether bytes agree on every axis within TOLERANCE."""
    return all(
        abs(emitted[key] - expected[key]) <= TOLERANCE * max(emitted[key], expected[key])
        for key in emitted.keys() | expected.keys()
    )


def why_equivalent(case: RuleCase) -> str | None:
    """The reason why the emitted collectives are equivalent to the planned ones.

    "" if they are the same, None if they are not equivalent.
    """
    if case.side.has_reduce_scatter and any(e.collective.gathers for e in case.emitted):
        return None  # twice the bytes of the gather that the compiler has
    if reduces_wrongly(case.planned, case.emitted):
        return None
    if any(e.shuffled and e.collective.op != "all_reduce" for e in case.emitted):
        return None  # shards in another order are other numbers
    notes = _notes(planned_bytes(case.planned), case, RULES)
    return None if notes is None or not _joins_all(case) else "; ".join(filter(None, notes))


def _notes(expected: Counter[_Key], q: RuleCase, rules: Sequence[_Rule]) -> list[str] | None:
    """Notes of the rules that lead from the expected bytes to the emitted ones.

    None if no subset of `rules` does. Each rule is tried, in order, with and without the rules before it.
    """
    if not rules:
        return [] if meets(emitted_bytes(q.emitted), expected) else None
    if rewritten := rules[0](expected, q):
        notes = _notes(rewritten[0], q, rules[1:])
        if notes is not None:
            return [rewritten[1], *notes]
    return _notes(expected, q, rules[1:])


def reduces_wrongly(planned: Iterable[PlannedCollective], emitted: Iterable[Emitted]) -> bool:
    """Whether gradients are reduced by an operation other than addition."""
    others = any(e.collective.reduction in ("maximum", "minimum", "multiply", "and", "or") for e in emitted)
    return others and any(p.what == "gradients" for p in planned)


def tied(expected: Counter[_Key], q: RuleCase) -> Rewritten | None:
    """The bytes of one of two planned uses, on the axes with fewer emitted bytes.

    The use with more runs is kept. A sum in steps (`across_slices`) counts by its first step, which moves all
    bytes.
    """
    uses: dict[tuple[str, frozenset[str], int], list[float]] = defaultdict(list)
    for p in q.planned:
        uses[p.op, frozenset(p.axes), p.gathered_bytes].append(p.count)
    actual, less, notes = emitted_bytes(q.emitted), expected.copy(), []
    steps = emitted_bytes(e for e in q.emitted if e.is_part)
    for (op, axes, size), counts in uses.items():
        moved = max(actual[op, axes], *(steps[kind, axes] for kind in REDUCTIONS))
        if len(counts) == _TWICE and moved < _HALF * expected[op, axes]:
            less[op, axes] -= round(size * min(counts))
            is_table = any(p.tensor in ("embed", "unembed") for p in q.planned)
            note = _TIED["all_gather" if op == "all_gather" else "sum"]
            notes.append(note if is_table else note.replace("the tied table", q.planned[0].tensor))
    return (less, "; ".join(dict.fromkeys(notes))) if notes else None


_TWICE = 2
# Between the shares of one use and of two.
_HALF = 0.75
_TIED = {
    "all_gather": "gathered once for both uses of the tied table: fewer bytes, more memory",
    "sum": "the tied table's two gradients are added before they are reduced",
}


def kept_gathers(expected: Counter[_Key], q: RuleCase) -> Rewritten | None:
    """The gathers of one microbatch, once for each loop of the program that holds them.

    A weight in several stacks of layers may be kept in some of them only: XLA hoists gathers out of loops,
    and a stack of one layer has no loop.
    """
    actual, wanted = emitted_bytes(q.emitted), sum(expected.values())
    is_fewer = sum(actual.values()) < (1 - TOLERANCE) * wanted
    if not is_fewer or any(p.op != "all_gather" for p in q.planned):
        return None
    forms, planned = [], planned_bytes(q.planned)
    for uses in _uses(q):
        words = " and ".join(map(str, sorted(set(uses.values()) - {1})))
        for times in range(1, q.side.num_loops + 1):
            left = Counter[_Key]()
            for p in q.planned:
                left[p.op, frozenset(p.axes)] += round(p.step_bytes * min(1.0, times / uses[p.count]))
            share = {key: left[key] / size for key, size in planned.items() if size}
            kept = {key: round(size * share.get(key, 1)) for key, size in expected.items()}
            often = "once" if times == 1 else f"once in each of {times} loops"
            note = f"gathered {often} and kept for {words} uses: fewer bytes, more memory"
            forms.append((Counter(kept), note))
    # Without an exact form return the first, since later rules may rewrite it further.
    return next((form for form in forms if meets(actual, form[0])), forms[0] if forms else None)


def _uses(q: RuleCase) -> Iterator[dict[float, int]]:
    """Runs of a planned gather that may share one result, by its runs in a step.

    A stage's layers run in each of its passes, a head once for each microbatch. 1: each run gathers.
    """
    often = sorted({q.side.num_microbatches, q.side.num_passes, 1}, reverse=True)
    counts = sorted({p.count for p in q.planned})
    for uses in product(*([one for one in often if one <= count] for count in counts)):
        if max(uses) > 1:
            yield dict(zip(counts, uses, strict=True))


def _joined(expected: Counter[_Key], q: RuleCase) -> Rewritten | None:
    """One collective instead of several over parts of its axes, with their largest V."""
    rewritten = expected.copy()
    for (op, axes), size in emitted_bytes(q.emitted).items():
        for parts in _partitions(axes, op, rewritten) if (op, axes) not in expected else ():
            sizes = [rewritten[op, part] for part in parts]
            if abs(max(sizes) - size) <= TOLERANCE * size:
                for part in parts:
                    del rewritten[op, part]
                rewritten[op, axes] = max(sizes)
                break
    return None if rewritten == expected else (rewritten, "one collective over all axes, not one per axis")


def one_by_one(expected: Counter[_Key], q: RuleCase) -> Rewritten | None:
    """Consecutive sums over parts of the axes instead of one sum, each of the same bytes.

    Applies to a single number, on CPUs also to a vector. XLA:CPU sums the gradient of a norm or a bias over
    the axes of one dimension, then over the axes of the next. It may round between these sums to the
    gradients' type; the first sum is in the planned type.
    """
    rewritten, actual = expected.copy(), emitted_bytes(q.emitted)
    is_split = is_single_number if q.side.has_reduce_scatter else _is_vector
    for p in filter(is_split, q.planned):
        key, size = (p.op, frozenset(p.axes)), round(p.step_bytes)
        parts = _partitions(key[1], p.op, actual) if key not in actual else []
        if parts:
            rewritten[key] -= size
            rounded = [part for part in parts[0] if _sent_in(q, p.op, part) == {q.side.gradients_dtype}]
            narrow = 1.0 if len(rounded) == len(parts[0]) else _narrowing(p, q)
            for part in parts[0]:
                rewritten[p.op, part] += round(size * narrow) if part in rounded else size
    what = "a scalar" if any(map(is_single_number, q.planned)) else "a vector"
    return None if rewritten == expected else (rewritten, f"{what}, all-reduced over one axis after another")


def _sent_in(q: RuleCase, op: str, axes: frozenset[str]) -> set[str]:
    """The types of the emitted collectives with this operation and these axes."""
    return {e.dtype for e in q.emitted if (e.op, frozenset(e.axes)) == (op, axes)}


def _narrowing(p: PlannedCollective, q: RuleCase) -> float:
    """Bytes of a number in the gradients' type, divided by its planned bytes."""
    return dtype_bytes(q.side.gradients_dtype) / dtype_bytes(p.dtype)


def _partitions(axes: frozenset[str], op: str, among: Counter[_Key]) -> list[tuple[frozenset[str], ...]]:
    """Two or three sets of axes with `op` that together make up `axes`."""
    parts = [over for name, over in among if name == op and over < axes]
    return [
        some
        for count in (2, 3)
        for some in combinations(parts, count)
        if sum(map(len, some)) == len(axes) and frozenset().union(*some) == axes
    ]


def scattered_sums(expected: Counter[_Key], q: RuleCase) -> Rewritten | None:
    """The scatter over X without the sum over Y, if an all-reduce over both keeps X.

    V of the scatter is the all-reduce's. More axes than planned may be kept, since a planned all-reduce may
    be sliced later.
    """
    if q.side.has_reduce_scatter:
        return None
    rewritten, scattered = expected.copy(), set()
    for e in (e for e in q.emitted if e.collective.op == "all_reduce" and not e.collective.gathers):
        parts = _scattered_by(e, expected)
        left, size = frozenset(e.axes), e.bytes_per_step
        for over in parts:
            assert e.mesh
            rewritten["reduce_scatter", over] -= size
            left, size = left - over, round(size / e.mesh.size(tuple(over)))
        if parts and left:
            rewritten["all_reduce", left] -= size
        if parts:
            rewritten["all_reduce", frozenset(e.axes)] += e.bytes_per_step
            scattered.update(*parts)
    if not scattered:
        return None
    return _without_rounding(rewritten, expected), (
        f"an all-reduce of which each device keeps its slice over {'·'.join(sorted(scattered))}: "
        "XLA:CPU has no reduce-scatter, so more bytes move"
    )


def _scattered_by(e: Emitted, expected: Counter[_Key]) -> list[frozenset[str]]:
    """The planned scatters that an all-reduce does within the axes that it keeps, largest first."""
    planned = [axes for op, axes in expected if op == "reduce_scatter" and axes <= frozenset(e.kept)]
    if frozenset(e.kept) in planned:
        return [frozenset(e.kept)]
    scatters: list[frozenset[str]] = []
    for axes in sorted(planned, key=lambda axes: -expected["reduce_scatter", axes]):
        if not any(axes & other for other in scatters):
            scatters.append(axes)
    return scatters


def _without_rounding(rewritten: Counter[_Key], before: Counter[_Key]) -> Counter[_Key]:
    """Drop keys whose rest is smaller than rounding."""
    return Counter({
        key: size for key, size in rewritten.items() if abs(size) > TOLERANCE * max(before[key], 1)
    })  # fmt: skip


def lookups(expected: Counter[_Key], q: RuleCase) -> Rewritten | None:
    """The planned bytes in float32 of the collectives that send rows of a table.

    The sum over other axes that follows a scatter may be narrow again.
    """
    wide = {(e.op, frozenset(e.axes)) for e in q.emitted if e.widened and e.dtype == "f32" and _is_lookup(e)}
    apart = [e for e in q.emitted if (e.op, frozenset(e.axes)) not in wide]
    narrow = {p.dtype for p in q.planned}
    if q.side.has_reduce_scatter or not wide or len(narrow) != 1 or narrow == {"f32"}:
        return None
    dtype = narrow.pop()
    if any(e.dtype != dtype for e in apart):
        return None
    factor = dtype_bytes("f32") / dtype_bytes(dtype)
    return (
        Counter({key: round(size * (factor if key in wide else 1)) for key, size in expected.items()}),
        f"sent as f32, planned as {dtype}: XLA:CPU gathers and scatters rows of a table in f32",
    )


def narrowed(expected: Counter[_Key], q: RuleCase) -> Rewritten | None:
    """The bytes in the gradients' type.

    Applies if the plan sums the gradients of small weights in float32.
    """
    dtype = q.side.gradients_dtype
    is_wide = all(p.dtype == "f32" and p.op == "all_reduce" and p.what == "gradients" for p in q.planned)
    is_narrow = all(e.dtype == dtype for e in q.emitted)
    if not q.side.has_reduce_scatter or dtype == "f32" or not is_wide or not is_narrow:
        return None
    factor = dtype_bytes(dtype) / dtype_bytes("f32")
    return (
        Counter({key: round(size * factor) for key, size in expected.items()}),
        f"reduced in {dtype}: XLA converts before the collective",
    )


def _is_lookup(e: Emitted) -> bool:
    """Whether rows of a table are sent: looked up, or scattered into its gradient."""
    return primitive_of(e.collective.operand_op_name) in _LOOKUPS


def sums_apart(expected: Counter[_Key], q: RuleCase) -> Rewritten | None:
    """A sum of one number per weight instead of one for all weights.

    Each is over every axis that splits its weight. XLA for GPU sends all in one all-reduce, XLA for TPU in
    one for each order of the axes. They may add weights' numbers before it.
    """
    singles = [e for e in q.emitted if e.op == "all_reduce" and e.num_bytes <= SINGLE_NUMBER]
    if len(singles) < len(q.emitted) or not all(is_single_number(p) for p in q.planned):
        return None
    times = sum(p.count for p in q.planned)
    wanted = {axis: times * q.side.split_weights.get(axis, 0) for p in q.planned for axis in p.axes}
    actual: Counter[str] = Counter()
    for e in singles:
        actual.update(dict.fromkeys(e.axes, e.runs))
    if not q.side.has_reduce_scatter:
        apart = emitted_bytes(singles), "one scalar per weight: XLA:CPU does not combine these all-reduces"
        return apart if actual == wanted else None
    sent = sum({e.collective.name: e.runs for e in singles}.values())
    # XLA for TPU does not combine sums whose groups list the same devices in different orders.
    orders = len({e.axes for e in singles})
    if (
        actual.keys() != wanted.keys()
        or sent > times * orders
        or any(actual[axis] > wanted[axis] for axis in wanted)
    ):
        return None
    return emitted_bytes(singles), "one scalar per weight, sent together"


def is_single_number(p: PlannedCollective) -> bool:
    """Whether it sums a single number: a loss, or a norm."""
    return p.op == "all_reduce" and p.gathered_bytes <= SINGLE_NUMBER


def _is_vector(p: PlannedCollective) -> bool:
    """Whether it sums a single number, or the gradient of a norm or a bias."""
    return is_single_number(p) or (p.op == "all_reduce" and ("norm" in p.tensor or p.tensor.endswith("bias")))


def rings(expected: Counter[_Key], q: RuleCase) -> Rewritten | None:
    """Permutes of blocks in n - 1 steps instead of a gather, a scatter or both.

    The bytes of the permutes are V (n - 1).
    """
    rewritten, actual = expected.copy(), emitted_bytes(q.emitted)
    for (op, axes), _ in actual.items():
        if op != "permute" or (op, axes) in expected:
            continue
        n = _size(q, axes)
        for kind in ("all_gather", "reduce_scatter"):
            if kind_bytes := rewritten.pop((kind, axes), 0):
                rewritten["permute", axes] += (kind_bytes - actual[kind, axes]) * (n - 1)
                if actual[kind, axes]:
                    rewritten[kind, axes] = actual[kind, axes]
    return None if rewritten == expected else (rewritten, "a ring of collective-permutes, one block per step")


def _size(q: RuleCase, axes: Iterable[str]) -> int:
    """Devices along mesh axes."""
    mesh = next(e.mesh for e in q.emitted if e.mesh)
    return mesh.size(tuple(axes))


def padded(expected: Counter[_Key], q: RuleCase) -> Rewritten | None:
    """The planned bytes, if the emitted collectives also send padding.

    Padding does not count. Permutes return at most one slice of each device to its owner.
    """
    if not any(e.collective.padding_bytes for e in q.emitted):
        return None
    if spare := sum(e.collective.padding_bytes * e.runs for e in q.emitted if e.collective.has_room):
        return expected, (
            f"{spare:,} B a step more: XLA:CPU has no exchange of unequal parts, so a round sends its whole "
            "capacity, and a plan counts the rows of an even load"
        )
    whole = sum(e.bytes_per_step for e in q.emitted if not e.collective.follows_sum)
    padding = sum(e.collective.padding_bytes * e.runs for e in q.emitted)
    moved = sum(e.bytes_per_step for e in q.emitted if e.op == "permute" and e.collective.follows_sum)
    then = f", then {moved:,} B per step permuted to their devices" if moved else ""
    return expected, f"padded by {padding / whole:.1%} to whole tiles{then}"


def across_slices(expected: Counter[_Key], q: RuleCase) -> Rewritten | None:
    """A sum within each slice, then across slices.

    The second step moves V again after an all-reduce, and one part of V after a scatter.
    """
    rewritten = expected.copy()
    for axes in {frozenset(e.axes) for e in q.emitted if e.is_part and not e.collective.follows_sum}:
        parts = [e for e in q.emitted if frozenset(e.axes) == axes and not e.collective.follows_sum]
        whole = sum(expected[kind, axes] for kind in REDUCTIONS)
        first = max(parts, key=lambda e: e.num_bytes)
        then = next((e.op for e in parts if e.collective.groups != first.collective.groups), "")
        if not whole or not {first.op, then} <= set(REDUCTIONS):
            continue
        for kind in REDUCTIONS:
            rewritten.pop((kind, axes), None)
        shares = first.collective.groups.size if first.op == "reduce_scatter" else 1
        rewritten[first.op, axes] += whole
        rewritten[then, axes] += round(whole / shares)
    return None if rewritten == expected else (rewritten, "reduced within each slice, then across slices")


def _joins_all(q: RuleCase) -> bool:
    """Whether steps over parts of axes together join all devices of the axes.

    Groups of 4 within each slice and groups across 2 slices join 8, for example.
    """
    steps = [e for e in q.emitted if not e.collective.follows_sum]
    mesh = next((e.mesh for e in steps if e.is_part), None)
    if mesh is None:
        return True
    joined_sets = [set(group) for groups in {e.collective.groups for e in steps} for group in groups.members]
    together = {0}
    while more := {device for group in joined_sets if group & together for device in group} - together:
        together |= more
    return len(together) == mesh.size(_axes_of(steps))


def _axes_of(emitted: Iterable[Emitted]) -> Axes:
    return tuple(dict.fromkeys(axis for e in emitted for axis in e.axes))


RULES: tuple[_Rule, ...] = (
    scattered_sums, one_by_one, tied, kept_gathers, _joined, lookups, narrowed, sums_apart, rings, padded,
    across_slices,
)  # fmt: skip
