"""Derived collectives beside those that XLA emitted for the same few steps, in groups as small as can be.

What belongs together is judged by the same rules as in an audit. There (`line_up`) a tensor's name joins both
sides and bytes are summed over a step. Here nothing has a name: a group is what the rules accept.
Slices and axes of size one move nothing and are left out.
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
    """A collective of the algebra with V in bytes; windowed: in num_hops steps under the product.

    To rules (`compare.rules.PlannedCollective`) a windowed one is the permutes that it is made of.
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
            hops = mesh.size(axes) - 1 if step is windowed else 0
            found.append(Derived(step, axes, step.gathered_bytes(mesh, sizes, dtype), dtype, hops))
    return found


def match(wanted: Sequence[Derived], found: Sequence[Emitted]) -> list[Pair]:
    """Groups of what belongs together; what is left over of either side differs."""
    pairs: list[Pair] = []
    taken: set[int] = set()
    for some, ones in _groups(wanted, found):
        group = {id(one) for one in (*some, *ones)}
        note = why_equivalent(RuleCase(some, ones, Side())) if taken.isdisjoint(group) else None
        if note is not None:
            pairs.append(Pair(some, ones, "equivalent" if note else "match", note))
            taken |= group
    pairs += [Pair((d,), (), "differs", "derived and not emitted") for d in wanted if id(d) not in taken]
    left = (e for e in found if id(e) not in taken)
    return pairs + [Pair((), (e,), "differs", e.note or "emitted and not derived") for e in left]


def _groups(
    wanted: Sequence[Derived], found: Sequence[Emitted]
) -> Iterator[tuple[tuple[Derived, ...], tuple[Emitted, ...]]]:
    """What may belong together: sums in a row may be made as one, and one transfer in many permutes.

    A scatter asks first: an all-reduce of the same size may be sliced later for another reason.
    """
    in_order = sorted(wanted, key=lambda d: d.op != "reduce_scatter")
    for count in range(1, len(wanted) + 1):
        for some in combinations(in_order, count):
            if count == 1 or all(d.op in REDUCTIONS for d in some):
                ring = tuple(e for e in found if e.op == "permute" and set(e.axes) == set(some[0].axes))
                yield from ((some, ones) for ones in (ring, *((e,) for e in found)) if ones)
