"""Every operation of a priced step as a point under the roofs of its chip.

    achieved FLOP/s = FLOPs / seconds,   intensity = FLOPs / bytes

once with the bytes that cross HBM and the seconds of the work, and once with the bytes that the
operation's collectives move and the seconds that it waits for them besides. What moves an input that
several products read counts to each of them by its FLOPs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.cost.graph import Direction, Graph, Node, Segment, Work, recomputed_nodes
from meshwright.cost.passes import Dtypes, work_seconds
from meshwright.cost.priced import PricedCollective
from meshwright.hardware.chip import Chip
from meshwright.plan.candidate import Candidate

# An all-reduce moves an array twice: a reduce-scatter and an all-gather.
_MOVES = {"all_reduce": 2}
_Key = tuple[str, Direction]


@dataclass(frozen=True)
class StepOperation:
    """One operation in one direction over a whole step, on the chip that has most to do.

    seconds: of its work. link_bytes, link_seconds: of its collectives; exposed_seconds: of those, what
    does not hide. bound: "compute" or "hbm".
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
        """Achieved while it computes."""
        return self.flops / self.seconds

    @property
    def linked_flops_per_second(self) -> float:
        """Achieved when what it waits for its collectives counts too."""
        return self.flops / (self.seconds + self.exposed_seconds)

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of HBM traffic."""
        return self.flops / self.hbm_bytes

    @property
    def link_intensity(self) -> float:
        """FLOPs for each byte that its collectives move."""
        return self.flops / self.link_bytes


@dataclass(frozen=True)
class LinkRoof:
    """What the links along some mesh axes give: bytes of gathered arrays per second, the best priced.

    seconds: that the step's collectives keep them busy.
    """

    axes: tuple[str, ...]
    bytes_per_second: float
    seconds: float


def operations(candidate: Candidate) -> list[StepOperation]:
    """Every operation that works, by time. Those of one name in one direction are added up."""
    layout, chip = candidate.layout, candidate.hardware.chip
    dtypes, totals = Dtypes.of(layout), dict[_Key, StepOperation]()
    for segment, runs in zip(candidate.graph.segments, candidate.cost.runs, strict=True):
        if not runs:
            continue
        for direction, node in _in_directions(segment, layout.remat):
            if found := _priced(node, direction, runs, dtypes, chip):
                key = found.name, direction
                totals[key] = _sum(totals[key], found) if key in totals else found
    with_links = _with_collectives(totals, candidate.cost.collectives, _owners(candidate.graph))
    return sorted(with_links, key=lambda operation: -operation.seconds)


def link_roofs(candidate: Candidate) -> list[LinkRoof]:
    """A roof for each set of mesh axes that a collective of the step takes."""
    rates: dict[tuple[str, ...], float] = {}
    seconds: dict[tuple[str, ...], float] = {}
    for planned in candidate.cost.collectives:
        axes = planned.axes
        if planned.seconds > 0 and planned.op != "all_to_all":
            rates[axes] = max(rates.get(axes, 0.0), _moved_bytes(planned) / planned.seconds)
            seconds[axes] = seconds.get(axes, 0.0) + planned.step_seconds
    return [LinkRoof(axes, rate, seconds[axes]) for axes, rate in rates.items()]


def _in_directions(segment: Segment, remat: str) -> Iterator[tuple[Direction, Node]]:
    """Every node in every direction in which it runs."""
    groups: tuple[tuple[Direction, Iterable[Node]], ...] = (
        ("forward", segment.nodes),
        ("recompute", recomputed_nodes(segment, remat)),
        ("backward", segment.nodes),
    )
    for direction, nodes in groups:
        for node in nodes:
            yield direction, node


def _priced(
    node: Node, direction: Direction, runs: float, dtypes: Dtypes, chip: Chip
) -> StepOperation | None:
    """The work of a node in one direction; None where it only moves something."""
    pieces = (*node.backward, *node.weight_gradient) if direction == "backward" else node.forward
    if not pieces:
        return None
    priced = [work_seconds(work, node.kind, dtypes, chip) for work in pieces]
    longest = max(priced, key=lambda piece: piece[0])
    return StepOperation(
        node.name,
        node.kind,
        direction,
        flops=runs * _total(pieces, "flops"),
        hbm_bytes=runs * _total(pieces, "hbm_bytes"),
        seconds=runs * sum(seconds for seconds, _ in priced),
        bound=longest[1],
    )


def _total(pieces: Iterable[Work], key: str) -> float:
    return sum(getattr(work, key) for work in pieces)


def _sum(one: StepOperation, other: StepOperation) -> StepOperation:
    """Both as one: layers of several kinds share their names."""
    longer = max(one, other, key=lambda operation: operation.seconds)
    return replace(
        longer,
        flops=one.flops + other.flops,
        hbm_bytes=one.hbm_bytes + other.hbm_bytes,
        seconds=one.seconds + other.seconds,
    )


def _with_collectives(
    totals: Mapping[_Key, StepOperation],
    collectives: Iterable[PricedCollective],
    owners: Mapping[str, set[str]],
) -> list[StepOperation]:
    """The operations with the collectives of their tensors; those of an update go to no operation."""
    found = dict(totals)
    for planned in collectives:
        served = _served(planned, found, owners)
        flops = sum(found[key].flops for key in served)
        for key in served:
            share = found[key].flops / flops if flops else 1 / len(served)
            found[key] = _add_transfer(found[key], planned, share)
    return list(found.values())


def _served(
    planned: PricedCollective, found: Mapping[_Key, StepOperation], owners: Mapping[str, set[str]]
) -> list[_Key]:
    """The operations that a transfer's tensor belongs to, in its direction.

    What is moved again for one that is not recomputed serves its backward pass.
    """
    names = sorted(owners.get(planned.tensor, {planned.tensor}))
    keys: list[_Key] = [(name, planned.direction) for name in names]
    if planned.direction == "recompute" and not any(key in found for key in keys):
        keys = [(name, "backward") for name in names]
    return [key for key in keys if key in found]


def _owners(graph: Graph) -> dict[str, set[str]]:
    """The operations that read what a node moves, by its name; those before it where none does.

    `to_wq+wk+wv` is the input of three products, `k` and `v` are attention's. Operations own themselves.
    """
    working = {node.name for _, node in graph.nodes() if node.forward}
    found: dict[str, set[str]] = {}
    for segment in graph.segments:
        readers: dict[int, set[str]] = {}
        for number, node in reversed(list(enumerate(segment.nodes))):
            reading = {node.name} if node.name in working else set()
            if not reading:
                reading = reading.union(*(readers.get(id(value), set()) for value in node.outputs))
                before = [one.name for one in segment.nodes[:number] if one.name in working]
                found.setdefault(node.name, set()).update(reading or before[-1:])
            for value in node.inputs:
                readers.setdefault(id(value), set()).update(reading)
    return found


def _add_transfer(operation: StepOperation, planned: PricedCollective, share: float) -> StepOperation:
    return replace(
        operation,
        link_bytes=operation.link_bytes + _moved_bytes(planned) * planned.count * share,
        link_seconds=operation.link_seconds + planned.step_seconds * share,
        exposed_seconds=operation.exposed_seconds + planned.exposed_seconds * share,
    )


def _moved_bytes(planned: PricedCollective) -> float:
    return planned.gathered_bytes * _MOVES.get(planned.op, 1)
