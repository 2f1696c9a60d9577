"""The operations of a priced step as points under the rooflines of a chip.

    achieved FLOP/s = FLOPs / seconds,    intensity = FLOPs / bytes

The HBM roofline takes the bytes that cross HBM, and the seconds of the work. The link roofline takes the
bytes that the operation's collectives move, and adds the seconds that it waits for them. If several products
read one gathered input, its transfer is shared among them by their FLOPs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.cost.graph import Direction, Graph, Node, Segment, recomputed_nodes
from meshwright.cost.passes import Dtypes, work_seconds
from meshwright.cost.priced import PricedCollective
from meshwright.plan.candidate import Candidate

# An all-reduce moves an array twice: a reduce-scatter and an all-gather.
_MOVES = {"all_reduce": 2}
_Key = tuple[str, Direction]


@dataclass(frozen=True)
class StepOperation:
    """One operation in one direction over a whole step, on the busiest chip.

    seconds: time of its work. bound: "compute" or "hbm". link_bytes, link_seconds: all of its collectives.
    exposed_seconds: the part of link_seconds that does not overlap with compute.
    """

    name: str
    kind: str
    direction: Direction
    flops: float
    hbm_bytes: float
    seconds: float
    bound: str
    link_bytes: float = 0.0
    link_seconds: float = 0.0
    exposed_seconds: float = 0.0

    @property
    def flops_per_second(self) -> float:
        """FLOP/s achieved during the work."""
        return self.flops / self.seconds

    @property
    def linked_flops_per_second(self) -> float:
        """FLOP/s achieved if the exposed time of its collectives counts too."""
        return self.flops / (self.seconds + self.exposed_seconds)

    @property
    def intensity(self) -> float:
        """FLOPs per byte of HBM traffic."""
        return self.flops / self.hbm_bytes

    @property
    def link_intensity(self) -> float:
        """FLOPs per byte that its collectives move."""
        return self.flops / self.link_bytes


@dataclass(frozen=True)
class LinkRoof:
    """The bandwidth of the links along some mesh axes: bytes of gathered arrays per second, at best.

    seconds: time per step that collectives take on them.
    """

    axes: tuple[str, ...]
    bytes_per_second: float
    seconds: float


def operations(candidate: Candidate) -> list[StepOperation]:
    """The operations of a step, the longest first; equal names in one direction are added up."""
    layout, by_key = candidate.layout, dict[_Key, StepOperation]()
    dtypes, chip = Dtypes.of(layout), candidate.hardware.chip
    for segment, runs in zip(candidate.graph.segments, candidate.cost.runs, strict=True):
        for direction, node in _nodes(segment, layout.schedule.remat):
            pieces = (*node.backward, *node.weight_gradient) if direction == "backward" else node.forward
            if not runs or not pieces:
                continue
            priced = [work_seconds(work, node.kind, dtypes, chip) for work in pieces]
            step_operation = StepOperation(
                node.name,
                node.kind,
                direction,
                flops=runs * sum(work.flops for work in pieces),
                hbm_bytes=runs * sum(work.hbm_bytes for work in pieces),
                seconds=runs * sum(piece.seconds for piece in priced),
                bound=max(priced, key=lambda piece: piece.seconds).bound,
            )
            key = node.name, direction
            by_key[key] = _sum(by_key[key], step_operation) if key in by_key else step_operation
    owners = _owners(candidate.graph)
    for planned in candidate.cost.collectives:
        keys = _served(planned, by_key, owners)
        flops = sum(by_key[key].flops for key in keys)
        for key in keys:
            step_operation = by_key[key]
            share = step_operation.flops / flops if flops else 1 / len(keys)
            by_key[key] = replace(
                step_operation,
                link_bytes=step_operation.link_bytes + _moved_bytes(planned) * planned.count * share,
                link_seconds=step_operation.link_seconds + planned.step_seconds * share,
                exposed_seconds=step_operation.exposed_seconds + planned.exposed_seconds * share,
            )
    return sorted(by_key.values(), key=lambda operation: -operation.seconds)


def link_roofs(candidate: Candidate) -> list[LinkRoof]:
    """A roof for each set of mesh axes that a collective of the step uses."""
    roofs: dict[tuple[str, ...], LinkRoof] = {}
    for planned in candidate.cost.collectives:
        if planned.seconds > 0 and planned.op != "all_to_all":
            before = roofs.get(planned.axes, LinkRoof(planned.axes, 0.0, 0.0))
            rate = max(before.bytes_per_second, _moved_bytes(planned) / planned.seconds)
            roofs[planned.axes] = LinkRoof(planned.axes, rate, before.seconds + planned.step_seconds)
    return list(roofs.values())


def _nodes(segment: Segment, remat: str) -> Iterator[tuple[Direction, Node]]:
    """Each node with each direction that it runs in."""
    for node in segment.nodes:
        yield "forward", node
        yield "backward", node
    for node in recomputed_nodes(segment, remat):
        yield "recompute", node


def _sum(first: StepOperation, other: StepOperation) -> StepOperation:
    """Both as one operation: layers of several kinds share their names."""
    totals = {key: getattr(first, key) + getattr(other, key) for key in ("flops", "hbm_bytes", "seconds")}
    return replace(max(first, other, key=lambda operation: operation.seconds), **totals)


def _served(
    planned: PricedCollective, by_key: Mapping[_Key, StepOperation], owners: Mapping[str, set[str]]
) -> list[_Key]:
    """The operations that read the tensor of a collective, in its direction; none for an update.

    A tensor that is gathered again, for an operation that is not recomputed, serves its backward pass.
    """
    names = sorted(owners.get(planned.tensor, {planned.tensor}))
    keys: list[_Key] = [(name, planned.direction) for name in names]
    if planned.direction == "recompute" and not any(key in by_key for key in keys):
        keys = [(name, "backward") for name in names]
    return [key for key in keys if key in by_key]


def _owners(graph: Graph) -> dict[str, set[str]]:
    """The operations that read the output of each node, by its name; those before it if none does.

    `to_wq+wk+wv` is the input of three products; `k` and `v` are inputs of attention.
    """
    working = {node.name for _, node in graph.nodes() if node.forward}
    owners: dict[str, set[str]] = {}
    for segment in graph.segments:
        readers: dict[int, set[str]] = {}
        for number, node in reversed(list(enumerate(segment.nodes))):
            reading = {node.name} if node.name in working else set()
            if not reading:
                reading = reading.union(*(readers.get(id(value), set()) for value in node.outputs))
                before = [one.name for one in segment.nodes[:number] if one.name in working]
                owners.setdefault(node.name, set()).update(reading or before[-1:])
            for value in node.inputs:
                readers.setdefault(id(value), set()).update(reading)
    return owners


def _moved_bytes(planned: PricedCollective) -> float:
    return planned.gathered_bytes * _MOVES.get(planned.op, 1)
