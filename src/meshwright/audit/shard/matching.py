"""Derived collectives beside those that XLA emitted for the same few steps, one by one.

XLA:CPU has forms of its own, which mean the same:

    reduce_scatter   an all-reduce of which each device keeps its slice
    sums in a row    one all-reduce over the axes of all, of which what was to be scattered is kept

Slices and axes of size one move nothing and are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from meshwright.audit.facts.emitted import Emitted
from meshwright.notation.array import Axes
from meshwright.notation.collective import Collective
from meshwright.notation.mesh import Mesh


@dataclass(frozen=True)
class Derived:
    """A collective of the algebra with V in bytes; windowed: in steps under the product."""

    collective: Collective
    axes: Axes
    num_bytes: int
    windowed: bool = False

    def to_dict(self) -> dict:
        """The keys of `derived[]` in `mw shard --run`."""
        c = self.collective
        return {
            "op": c.op,
            "axes": list(self.axes),
            "operand": str(c.operand),
            "result": str(c.result),
            "bytes": self.num_bytes,
            "windowed": self.windowed,
        }


@dataclass(frozen=True)
class Pair:
    """What was derived beside what was emitted for it. status: match, equivalent or differs."""

    derived: tuple[Derived, ...]
    emitted: tuple[Emitted, ...]
    status: str
    note: str = ""


def derived(
    steps: Iterable[Collective],
    mesh: Mesh,
    sizes: Mapping[str, int],
    dtype: str,
    windowed: Collective | None = None,
) -> list[Derived]:
    """The collectives among `steps`; `windowed` runs in steps under the product."""
    found = []
    for step in steps:
        axes = tuple(axis for axis in step.axes if mesh.size(axis) > 1)
        if axes and step.op != "slice":
            found.append(Derived(step, axes, step.gathered_bytes(mesh, sizes, dtype), step is windowed))
    return found


def gathered_of_emitted(emitted: Emitted, mesh: Mesh) -> int:
    """V of an emitted collective as the notation counts it: n blocks of an all_to_all or a permute."""
    blocks = mesh.size(emitted.axes) if emitted.op in ("all_to_all", "permute") else 1
    return emitted.collective.source_bytes * blocks


def match(wanted: Sequence[Derived], found: Sequence[Emitted], mesh: Mesh) -> list[Pair]:
    """Pairs of what belongs together; what is left over of either side differs."""
    left, unpaired = list(wanted), list(found)
    pairs: list[Pair] = []
    # A scatter claims its slice before an all-reduce of the same size, which may be sliced later, can.
    for rule in (_windowed, _scattered, _same, _merged):
        while pair := rule(left, unpaired, mesh):
            pairs.append(pair)
            left = [d for d in left if not any(d is taken for taken in pair.derived)]
            unpaired = [e for e in unpaired if not any(e is taken for taken in pair.emitted)]
    pairs += [Pair((d,), (), "differs", "derived and not emitted") for d in left]
    return pairs + [Pair((), (e,), "differs", e.note or "emitted and not derived") for e in unpaired]


def _windowed(wanted: list[Derived], found: list[Emitted], mesh: Mesh) -> Pair | None:
    """n - 1 permutes of a block for the transfer that runs in steps."""
    for d in wanted:
        if d.windowed:
            hops = mesh.size(d.axes) - 1
            ring = [e for e in found if e.op == "permute" and set(e.axes) == set(d.axes)]
            if sum(e.collective.count or 1 for e in ring) == hops:
                return Pair((d,), tuple(ring), "match", f"overlaps the product: {hops} permutes of a block")
    return None


def _same(wanted: list[Derived], found: list[Emitted], mesh: Mesh) -> Pair | None:
    for d in wanted:
        for e in found:
            if not d.windowed and e.op == d.collective.op and _like(d, e, mesh):
                return Pair((d,), (e,), "match")
    return None


def _scattered(wanted: list[Derived], found: list[Emitted], mesh: Mesh) -> Pair | None:
    for d in wanted:
        for e in found:
            if d.collective.op == "reduce_scatter" and set(e.kept) == set(d.axes) and _like(d, e, mesh):
                return Pair((d,), (e,), "equivalent", _SCATTERED)
    return None


def _merged(wanted: list[Derived], found: list[Emitted], mesh: Mesh) -> Pair | None:
    """Sums of one array in a row, made at once; the largest is the first."""
    sums = [d for d in wanted if d.collective.op in ("all_reduce", "reduce_scatter")]
    for e in (e for e in found if e.op == "all_reduce"):
        for count in range(2, len(sums) + 1):
            for parts in combinations(sums, count):
                axes = [axis for d in parts for axis in d.axes]
                kept = {axis for d in parts if d.collective.op == "reduce_scatter" for axis in d.axes}
                whole = max(d.num_bytes for d in parts) == gathered_of_emitted(e, mesh)
                if sorted(axes) == sorted(e.axes) and kept <= set(e.kept) and whole:
                    return Pair(parts, (e,), "equivalent", _MERGED)
    return None


def _like(d: Derived, e: Emitted, mesh: Mesh) -> bool:
    return set(d.axes) == set(e.axes) and d.num_bytes == gathered_of_emitted(e, mesh)


_SCATTERED = "an all-reduce of which each device keeps its slice: a reduce-scatter as XLA:CPU writes it"
_MERGED = "sums in a row, made as one"
