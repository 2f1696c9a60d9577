"""Derived and emitted collectives of a few steps, matched in the smallest possible groups.

The rules are an audit's. `line_up` joins both sides by a tensor's name and sums bytes over a step. The
collectives here have no names, so a group is any set that the rules accept. Slices and axes of size one move
no bytes and are left out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from meshwright.audit.compare.rewrites import RuleCase, Side, why_equivalent
from meshwright.audit.facts.emitted import REDUCTIONS, Emitted
from meshwright.cost.graph import Cargo
from meshwright.notation.array import Axes
from meshwright.notation.collective import Collective
from meshwright.notation.mesh import Mesh


@dataclass(frozen=True)
class Derived:
    """A derived collective with V in bytes.

    num_hops: steps of a windowed collective, which runs under the product; 0 if it is not windowed. To the
    rules (`rewrites.PlannedCollective`) a windowed collective is its permutes.
    """

    collective: Collective
    axes: Axes
    gathered_bytes: int
    dtype: str
    num_hops: int = 0

    @property
    def windowed(self) -> bool:
        return self.num_hops > 0

    @property
    def op(self) -> str:
        return "permute" if self.windowed else self.collective.op

    @property
    def tensor(self) -> str:
        return self.collective.operand.name

    @property
    def what(self) -> Cargo:
        return "activations"

    @property
    def count(self) -> float:
        return self.num_hops or 1

    @property
    def step_bytes(self) -> float:
        return self.gathered_bytes * self.count

    def to_dict(self) -> dict:
        """The keys of `derived[]` in `mw shard --run`."""
        c = self.collective
        return {
            "op": c.op,
            "axes": list(self.axes),
            "operand": str(c.operand),
            "result": str(c.result),
            "bytes": self.gathered_bytes,
            "windowed": self.windowed,
        }


@dataclass(frozen=True)
class Pair:
    """Derived and emitted collectives that belong together. status: match, equivalent or differs."""

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
    """The collectives among `steps`. windowed: the one that runs in steps under the product."""
    collectives = []
    for step in steps:
        axes = tuple(axis for axis in step.axes if mesh.size(axis) > 1)
        if axes and step.op != "slice":
            hops = mesh.size(axes) - 1 if step is windowed else 0
            collectives.append(Derived(step, axes, step.gathered_bytes(mesh, sizes, dtype), dtype, hops))
    return collectives


def match(wanted: Sequence[Derived], emitted: Sequence[Emitted]) -> list[Pair]:
    """Pair derived with emitted collectives; the rest of either side differs."""
    pairs: list[Pair] = []
    taken: set[int] = set()
    for some, ones in _groups(wanted, emitted):
        group = {id(one) for one in (*some, *ones)}
        note = why_equivalent(RuleCase(some, ones, Side())) if taken.isdisjoint(group) else None
        if note is not None:
            pairs.append(Pair(some, ones, "equivalent" if note else "match", note))
            taken |= group
    pairs += [Pair((d,), (), "differs", "derived and not emitted") for d in wanted if id(d) not in taken]
    left = (e for e in emitted if id(e) not in taken)
    return pairs + [Pair((), (e,), "differs", e.note or "emitted and not derived") for e in left]


def _groups(
    wanted: Sequence[Derived], emitted: Sequence[Emitted]
) -> Iterator[tuple[tuple[Derived, ...], tuple[Emitted, ...]]]:
    """Candidate pairs: consecutive sums as one collective, or one transfer as several permutes.

    Scatters come first, because a later slice may make an all-reduce of the same size look like one.
    """
    in_order = sorted(wanted, key=lambda d: d.op != "reduce_scatter")
    for count in range(1, len(wanted) + 1):
        for some in combinations(in_order, count):
            if count == 1 or all(d.op in REDUCTIONS for d in some):
                ring = tuple(e for e in emitted if e.op == "permute" and set(e.axes) == set(some[0].axes))
                yield from ((some, ones) for ones in (ring, *((e,) for e in emitted)) if ones)
