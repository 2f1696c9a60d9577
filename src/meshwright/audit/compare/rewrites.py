"""The forms in which a compiler may write what was planned: named rules, each with what it expects.

A row is what was planned of one tensor in one pass beside what was emitted of it, as bytes per step by
operation and mesh axes. Each rule whose form is seen in the emitted rewrites the expected bytes; what was
emitted must then be what is expected on every axis, within TOLERANCE, neither more nor less.

    scattered_sums  XLA:CPU has no reduce-scatter: an all-reduce of which each device keeps its slice
    tied            a table that is read twice: gathered once, its gradients added before their sum
    kept_gathers    a weight gathered once for all microbatches, and kept
    joined          collectives over X, then over Y, of one array: at once over X and Y
    one_by_one      a number summed over X, then over Y, where a sum over both at once was planned; on CPUs
                    a vector, too
    lookups         XLA:CPU looks up and scatters rows of 16-bit tables in float32
    narrowed        gradients of norms, summed in float32, are sent in the type to which they are converted
    sums_apart      a number of each weight is summed in place of the norm's; on CPUs each by itself
    rings           a gather or scatter in steps: permutes of blocks round a ring
    padded          a reduce-scatter padded to whole tiles; its slices are permuted home
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

# Beyond this share on any axis, more or less, what was emitted is not what was planned. What a rule expects
# is exact but for the tiles that a compiler fills.
TOLERANCE = 0.005

# What a look-up is made of in JAX: rows taken, those of other shards masked, and its transpose.
_LOOKUPS = ("gather", "select_n", "scatter-add", "scatter")

Key = tuple[str, frozenset[str]]


@dataclass(frozen=True)
class Side:
    """What rules are told beside a row.

    split_weights: by axis, how many gradients, in gradients_dtype, it splits.
    has_reduce_scatter: the compiler can emit one; XLA:CPU cannot, and widens what it looks up.
    num_passes: how often a layer runs forward in a step, in so many loops of the program.
    """

    has_reduce_scatter: bool = False
    num_microbatches: int = 1
    num_passes: int = 1
    num_loops: int = 1
    split_weights: Mapping[str, int] = field(default_factory=dict)
    gradients_dtype: str = "f32"


class PlannedCollective(Protocol):
    """What rules ask of a planned collective: of a step (`PricedCollective`) or derived for a contraction.

    gathered_bytes: V of one run, in `dtype`. step_bytes: V of all runs, `count` of them.
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


Rewritten = tuple[Counter[Key], str]
Rule = Callable[[Counter[Key], RuleCase], Rewritten | None]


def planned_bytes(planned: Iterable[PlannedCollective]) -> Counter[Key]:
    """Bytes a step by operation and axes."""
    total: Counter[Key] = Counter()
    for p in planned:
        total[p.op, frozenset(p.axes)] += round(p.step_bytes)
    return total


def emitted_bytes(emitted: Iterable[Emitted]) -> Counter[Key]:
    """Bytes a step by operation and axes, as they travel; slices of sums on their way home are none."""
    total: Counter[Key] = Counter()
    for e in emitted:
        if not e.collective.follows_sum:
            total[e.op, frozenset(e.axes)] += e.gathered_per_step
    return total


def meets(found: Counter[Key], expected: Counter[Key]) -> bool:
    """Whether both have the same bytes on every axis within TOLERANCE."""
    return all(
        abs(found[key] - expected[key]) <= TOLERANCE * max(found[key], expected[key])
        for key in found.keys() | expected.keys()
    )


def why_equivalent(question: RuleCase) -> str | None:
    """Why what was emitted does what was planned: "" where it is that itself, None where it does not."""
    if question.side.has_reduce_scatter and any(e.collective.gathers for e in question.emitted):
        return None  # twice the bytes of the gather that the compiler has
    if reduces_wrongly(question.planned, question.emitted):
        return None
    if any(e.shuffled and e.collective.op != "all_reduce" for e in question.emitted):
        return None  # shards in another order are other numbers
    notes = _notes(planned_bytes(question.planned), question, RULES)
    return None if notes is None or not _joins_all(question) else "; ".join(filter(None, notes))


def _notes(expected: Counter[Key], q: RuleCase, rules: Sequence[Rule]) -> list[str] | None:
    """What those rules say that lead from the expected bytes to the emitted ones; None where none do."""
    if not rules:
        return [] if meets(emitted_bytes(q.emitted), expected) else None
    if rewritten := rules[0](expected, q):
        notes = _notes(rewritten[0], q, rules[1:])
        if notes is not None:
            return [rewritten[1], *notes]
    return _notes(expected, q, rules[1:])


def reduces_wrongly(planned: Iterable[PlannedCollective], emitted: Iterable[Emitted]) -> bool:
    """Whether gradients are reduced by another operation than addition, as the largest logits are."""
    others = any(e.collective.reduction in ("maximum", "minimum", "multiply", "and", "or") for e in emitted)
    return others and any(p.what == "gradients" for p in planned)


def tied(expected: Counter[Key], q: RuleCase) -> Rewritten | None:
    """The bytes of one use of what the plan moves twice, on the axes where less was emitted.

    Of a sum in steps (`across_slices`) the first step counts, which moves all of it. Of two uses the one that
    moves it more often is left.
    """
    uses: dict[tuple[str, frozenset[str], int], list[float]] = defaultdict(list)
    for p in q.planned:
        uses[p.op, frozenset(p.axes), p.gathered_bytes].append(p.count)
    found, less, notes = emitted_bytes(q.emitted), expected.copy(), []
    steps = emitted_bytes(e for e in q.emitted if e.is_part)
    for (op, axes, size), counts in uses.items():
        moved = max(found[op, axes], *(steps[kind, axes] for kind in REDUCTIONS))
        if len(counts) == _TWICE and moved < _HALF * expected[op, axes]:
            less[op, axes] -= round(size * min(counts))
            notes.append(_TIED["all_gather" if op == "all_gather" else "sum"])
    return (less, "; ".join(dict.fromkeys(notes))) if notes else None


_TWICE = 2
# Between one and two.
_HALF = 0.75
_TIED = {
    "all_gather": "gathered once for both uses of the tied table: fewer bytes, more memory",
    "sum": "the tied table's two gradients are added before they are reduced",
}


def kept_gathers(expected: Counter[Key], q: RuleCase) -> Rewritten | None:
    """The gathers of one microbatch, once for each loop of the program in which they stand.

    Of a weight in several stacks of layers those of some: a stack of one layer has no loop of its own, out of
    which XLA would have to take them.
    """
    found, wanted = emitted_bytes(q.emitted), sum(expected.values())
    is_fewer = sum(found.values()) < (1 - TOLERANCE) * wanted
    if not is_fewer or any(p.op != "all_gather" for p in q.planned):
        return None
    told, planned = [], planned_bytes(q.planned)
    for uses in _uses(q):
        words = " and ".join(map(str, sorted(set(uses.values()) - {1})))
        for times in range(1, q.side.num_loops + 1):
            left = Counter[Key]()
            for p in q.planned:
                left[p.op, frozenset(p.axes)] += round(p.step_bytes * min(1.0, times / uses[p.count]))
            share = {key: left[key] / size for key, size in planned.items() if size}
            kept = {key: round(size * share.get(key, 1)) for key, size in expected.items()}
            often = "once" if times == 1 else f"once in each of {times} loops"
            note = f"gathered {often} and kept for {words} uses: fewer bytes, more memory"
            told.append((Counter(kept), note))
    # Other rules may have more to say of what was kept.
    return next((one for one in told if meets(found, one[0])), told[0] if told else None)


def _uses(q: RuleCase) -> Iterator[dict[float, int]]:
    """How many of a planned gather's runs may be of the same numbers, by how often it runs in a step.

    A stage's layers run in every pass of it, a head once for each microbatch. What is not kept has 1.
    """
    often = sorted({q.side.num_microbatches, q.side.num_passes, 1}, reverse=True)
    counts = sorted({p.count for p in q.planned})
    for uses in product(*([one for one in often if one <= count] for count in counts)):
        if max(uses) > 1:
            yield dict(zip(counts, uses, strict=True))


def joined(expected: Counter[Key], q: RuleCase) -> Rewritten | None:
    """One collective in place of several of its kind over parts of its axes: its V is their largest."""
    rewritten = expected.copy()
    for (op, axes), size in emitted_bytes(q.emitted).items():
        for parts in _partitions(axes, op, rewritten) if (op, axes) not in expected else ():
            sizes = [rewritten[op, part] for part in parts]
            if abs(max(sizes) - size) <= TOLERANCE * size:
                for part in parts:
                    del rewritten[op, part]
                rewritten[op, axes] = max(sizes)
                break
    return None if rewritten == expected else (rewritten, "one collective over these axes, not one per axis")


def one_by_one(expected: Counter[Key], q: RuleCase) -> Rewritten | None:
    """Sums over parts of the axes of one number's sum, or on CPUs a vector's, each of as many bytes.

    XLA:CPU sums the gradient of a norm or a bias over the axes of one dimension, then over those of the next,
    for which it may round to the gradients' type. The first sum is in the type that is planned.
    """
    rewritten, found = expected.copy(), emitted_bytes(q.emitted)
    is_split = is_number if q.side.has_reduce_scatter else _is_vector
    for p in filter(is_split, q.planned):
        key, size = (p.op, frozenset(p.axes)), round(p.step_bytes)
        parts = _partitions(key[1], p.op, found) if key not in found else []
        if parts:
            rewritten[key] -= size
            rounded = [part for part in parts[0] if _sent_in(q, p.op, part) == {q.side.gradients_dtype}]
            narrow = 1.0 if len(rounded) == len(parts[0]) else _narrowing(p, q)
            for part in parts[0]:
                rewritten[p.op, part] += round(size * narrow) if part in rounded else size
    what = "a scalar" if any(map(is_number, q.planned)) else "a vector"
    return None if rewritten == expected else (rewritten, f"{what}, all-reduced over one axis after another")


def _sent_in(q: RuleCase, op: str, axes: frozenset[str]) -> set[str]:
    """The types of what was emitted over these axes."""
    return {e.dtype for e in q.emitted if (e.op, frozenset(e.axes)) == (op, axes)}


def _narrowing(p: PlannedCollective, q: RuleCase) -> float:
    """Bytes of a number in the gradients' type, over those in the planned one."""
    return dtype_bytes(q.side.gradients_dtype) / dtype_bytes(p.dtype)


def _partitions(axes: frozenset[str], op: str, among: Counter[Key]) -> list[tuple[frozenset[str], ...]]:
    """The sets of axes with `op` that make up `axes`, two or three at a time."""
    parts = [over for name, over in among if name == op and over < axes]
    return [
        some
        for count in (2, 3)
        for some in combinations(parts, count)
        if sum(map(len, some)) == len(axes) and frozenset().union(*some) == axes
    ]


def scattered_sums(expected: Counter[Key], q: RuleCase) -> Rewritten | None:
    """An all-reduce over X and Y that keeps X: V of the scatter over X, without the sum of slices over Y.

    It may keep more: slices of what was planned as an all-reduce are cut later.
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


def _scattered_by(e: Emitted, expected: Counter[Key]) -> list[frozenset[str]]:
    """The axes of the planned scatters that an all-reduce does: of what it keeps, the largest first."""
    planned = [axes for op, axes in expected if op == "reduce_scatter" and axes <= frozenset(e.kept)]
    if frozenset(e.kept) in planned:
        return [frozenset(e.kept)]
    found: list[frozenset[str]] = []
    for axes in sorted(planned, key=lambda axes: -expected["reduce_scatter", axes]):
        if not any(axes & other for other in found):
            found.append(axes)
    return found


def _without_rounding(rewritten: Counter[Key], before: Counter[Key]) -> Counter[Key]:
    """What is left of a key that was taken away but for rounding is nothing."""
    return Counter({
        key: size for key, size in rewritten.items() if abs(size) > TOLERANCE * max(before[key], 1)
    })  # fmt: skip


def lookups(expected: Counter[Key], q: RuleCase) -> Rewritten | None:
    """The planned bytes in float32 where rows of a table travel."""
    wide = [e for e in q.emitted if e.widened and e.dtype == "f32" and _is_lookup(e)]
    narrow = {p.dtype for p in q.planned}
    if q.side.has_reduce_scatter or len(wide) != len(q.emitted) or len(narrow) != 1 or narrow == {"f32"}:
        return None
    factor = dtype_bytes("f32") / dtype_bytes(dtype := narrow.pop())
    return (
        Counter({key: round(size * factor) for key, size in expected.items()}),
        f"sent as f32, planned as {dtype}: XLA:CPU gathers and scatters rows of a table in f32",
    )


def narrowed(expected: Counter[Key], q: RuleCase) -> Rewritten | None:
    """The bytes in the type of the other gradients, where the plan sums those of small weights in float32."""
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
    """Whether rows of a table travel: looked up, or scattered into its gradient."""
    return primitive_of(e.collective.operand_op_name) in _LOOKUPS


def sums_apart(expected: Counter[Key], q: RuleCase) -> Rewritten | None:
    """A sum of one number for each weight, over every axis that splits it, in place of one for all weights.

    XLA for GPU sends all in one all-reduce, and may add up weights before it.
    """
    singles = [e for e in q.emitted if e.op == "all_reduce" and e.num_bytes <= SINGLE_NUMBER]
    if len(singles) < len(q.emitted) or not all(is_number(p) for p in q.planned):
        return None
    times = sum(p.count for p in q.planned)
    wanted = {axis: times * q.side.split_weights.get(axis, 0) for p in q.planned for axis in p.axes}
    found: Counter[str] = Counter()
    for e in singles:
        found.update(dict.fromkeys(e.axes, e.runs))
    if not q.side.has_reduce_scatter:
        apart = emitted_bytes(singles), "one scalar per weight: XLA:CPU does not combine these all-reduces"
        return apart if found == wanted else None
    sent = sum({e.collective.name: e.runs for e in singles}.values())
    if found.keys() != wanted.keys() or sent > times or any(found[axis] > wanted[axis] for axis in wanted):
        return None
    return emitted_bytes(singles), "one scalar per weight, sent together"


def is_number(p: PlannedCollective) -> bool:
    """Whether it is a sum of a single number: of a loss, or of a norm."""
    return p.op == "all_reduce" and p.gathered_bytes <= SINGLE_NUMBER


def _is_vector(p: PlannedCollective) -> bool:
    """Whether it is a sum of a number, or of the gradient of a norm or a bias."""
    return is_number(p) or (p.op == "all_reduce" and ("norm" in p.tensor or p.tensor.endswith("bias")))


def rings(expected: Counter[Key], q: RuleCase) -> Rewritten | None:
    """V in n - 1 permutes of blocks, V (n - 1) as permutes count, for a planned gather, scatter or both."""
    rewritten, found = expected.copy(), emitted_bytes(q.emitted)
    for (op, axes), _ in found.items():
        if op != "permute" or (op, axes) in expected:
            continue
        n = _size(q, axes)
        for kind in ("all_gather", "reduce_scatter"):
            if kind_bytes := rewritten.pop((kind, axes), 0):
                rewritten["permute", axes] += (kind_bytes - found[kind, axes]) * (n - 1)
                if found[kind, axes]:
                    rewritten[kind, axes] = found[kind, axes]
    return None if rewritten == expected else (rewritten, "a ring of collective-permutes, one block per step")


def _size(q: RuleCase, axes: Iterable[str]) -> int:
    """Devices along mesh axes."""
    mesh = next(e.mesh for e in q.emitted if e.mesh)
    return mesh.size(tuple(axes))


def padded(expected: Counter[Key], q: RuleCase) -> Rewritten | None:
    """What was planned: padding is not counted, and permutes bring home at most one slice of each device."""
    if not any(e.collective.padding_bytes for e in q.emitted):
        return None
    if room := sum(e.collective.padding_bytes * e.runs for e in q.emitted if e.collective.has_room):
        return expected, (
            f"{room:,} B a step more: XLA:CPU has no exchange of unequal parts, so all that a round has room "
            "for travels, and a plan counts the rows of an even load"
        )
    whole = sum(e.bytes_per_step for e in q.emitted if not e.collective.follows_sum)
    padding = sum(e.collective.padding_bytes * e.runs for e in q.emitted)
    moved = sum(e.bytes_per_step for e in q.emitted if e.op == "permute" and e.collective.follows_sum)
    then = f", then {moved:,} B per step permuted to their devices" if moved else ""
    return expected, f"padded by {padding / whole:.1%} to whole tiles{then}"


def across_slices(expected: Counter[Key], q: RuleCase) -> Rewritten | None:
    """V within each slice, then across: V again after an all-reduce, one part of it after a scatter."""
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
    """Whether steps over parts of axes join all their devices together, as 4 in a slice by 2 slices do 8."""
    steps = [e for e in q.emitted if not e.collective.follows_sum]
    mesh = next((e.mesh for e in steps if e.is_part), None)
    if mesh is None:
        return True
    groups = [set(group) for one in {e.collective.groups for e in steps} for group in one.members]
    together = {0}
    while more := {device for group in groups if group & together for device in group} - together:
        together |= more
    return len(together) == mesh.size(_axes_of(steps))


def _axes_of(emitted: Iterable[Emitted]) -> Axes:
    return tuple(dict.fromkeys(axis for e in emitted for axis in e.axes))


RULES: tuple[Rule, ...] = (
    scattered_sums, one_by_one, tied, kept_gathers, joined, lookups, narrowed, sums_apart, rings, padded,
    across_slices,
)  # fmt: skip
