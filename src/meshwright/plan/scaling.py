"""The usual strategies against batch size and chips: each the best priced layout of its kind.

Every point is a Candidate of the planner, so its compute, communication and memory are those that the
search itself would have seen; no closed form is used. A strategy is a kind of mesh:

    DP          data alone: the weights whole on every chip
    FSDP        fsdp as wide as it divides, data for the rest
    TP          tensor > 1, the weights whole over data
    FSDP + TP   fsdp and tensor > 1, data for the rest

How to Scale Your Model, "Training", draws the same figure from formulas for one layer.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from meshwright.errors import LayoutError
from meshwright.hardware import catalog
from meshwright.hardware.chip import SharedMemory, Torus
from meshwright.hardware.topology import Hardware
from meshwright.layout import REMATS, Layout
from meshwright.models.config import ModelConfig
from meshwright.models.transformer import dimensions
from meshwright.plan.train import Candidate, price, usable_bytes
from meshwright.plan_file import Workload

STRATEGIES = ("DP", "FSDP", "TP", "FSDP + TP")
BEST = "best"
MAX_SHAPES = 6  # positions of a slider over chips
_SPAN = 16  # batches from the planned one over this to the planned one times this
_MAX_FSDP = 3  # widths of fsdp tried for one width of tensor
_MICROBATCHES = (1, 2, 4, 8, 16)  # tried where a layout lacks memory


@dataclass(frozen=True)
class Point:
    """A strategy at one batch: the candidate that stands for it."""

    strategy: str
    num_sequences: int
    candidate: Candidate


@dataclass(frozen=True)
class Sweep:
    """All points on one machine, by strategy and then batch; what cannot run has no point."""

    hardware: Hardware
    planned_tokens: int
    points: tuple[Point, ...]

    def of(self, strategy: str) -> list[Point]:
        """The points of one strategy, by batch."""
        found = [point for point in self.points if point.strategy == strategy]
        return sorted(found, key=lambda point: point.num_sequences)


def batches(num_sequences: int) -> list[int]:
    """Numbers of sequences around the planned one, each twice the one before."""
    halvings = [num_sequences // 2**n for n in range(_SPAN.bit_length() - 1, 0, -1)]
    doublings = [num_sequences * 2**n for n in range(_SPAN.bit_length())]
    return sorted({number for number in (*halvings, *doublings) if number >= 1})


def shapes(hardware: Hardware) -> list[Hardware]:
    """Machines of the same chip, smaller and larger, this one among them; one alone for a host.

    A torus grows from a cube by doubling its shortest side, which keeps every ring closed that can be;
    GPUs by doubling their nodes.
    """
    network = hardware.chip.network
    if isinstance(network, SharedMemory) or hardware.num_slices > 1:
        return [hardware]
    known = _torus_sizes(network) if isinstance(network, Torus) else _node_counts(hardware)
    others = [sizes for sizes in known if prod(sizes) != hardware.num_chips]
    name = hardware.spec.split(":")[0]
    found = [catalog.load(f"{name}:{'x'.join(map(str, sizes))}") for sizes in others]
    return _around(sorted([*found, hardware], key=lambda machine: machine.num_chips), hardware)


def layouts(config: ModelConfig, num_chips: int, strategy: str) -> Iterator[Layout]:
    """The meshes of a strategy on so many chips that divide the model."""
    sizes = dimensions(config)
    if strategy == "DP":
        yield Layout(data=num_chips)
        return
    tensors = [1]
    if strategy != "FSDP":
        tensors = [t for t in _divisors(num_chips) if t > 1 and all(sizes[x] % t == 0 for x in "NKFV")]
    for tensor in tensors:
        rest = num_chips // tensor
        if strategy == "TP":
            yield Layout(data=rest, tensor=tensor)
            continue
        widest = [f for f in _divisors(rest) if f > 1 and config.d_model % f == 0][-_MAX_FSDP:]
        yield from (Layout(data=rest // f, fsdp=f, tensor=tensor) for f in widest)


def best_of(
    config: ModelConfig, hardware: Hardware, workload: Workload, meshes: Iterable[Layout]
) -> Candidate | None:
    """The fastest that fits of these layouts, each under the schedule that lets it fit with least work.

    Where none fits, the one that lacks least memory. None where no mesh divides the model and the batch.
    """
    found = [one for mesh in meshes for one in _scheduled(config, hardware, workload, mesh)]
    return min(found, key=rank, default=None)


def rank(candidate: Candidate) -> tuple[float, float]:
    """Those that fit by time; after them the others by memory."""
    return (0 if candidate.fits else candidate.memory.total, candidate.step_seconds)


def sweep(
    config: ModelConfig, hardware: Hardware, workload: Workload, planned: Layout, searched: Iterable[Layout]
) -> Sweep:
    """Every strategy at every batch around the workload's, in the dtypes of `planned`.

    "best" is the best of all strategies and of the layouts `searched` (those a search ranks first).
    """
    points: list[Point] = []
    for num_sequences in batches(workload.num_sequences):
        one = Workload(num_sequences, workload.seq_len)
        here: list[Candidate] = []
        for strategy in STRATEGIES:
            meshes = [_typed(mesh, planned) for mesh in layouts(config, hardware.num_chips, strategy)]
            if found := best_of(config, hardware, one, meshes):
                points.append(Point(strategy, num_sequences, found))
                here.append(found)
        if found := best_of(config, hardware, one, searched):
            here.append(found)
        if here:
            points.append(Point(BEST, num_sequences, min(here, key=rank)))
    return Sweep(hardware, workload.num_tokens, tuple(points))


def _scheduled(
    config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout
) -> Iterator[Candidate]:
    """The layout as it is; where it lacks memory, with more recomputed and smaller microbatches too."""
    first = _priced(config, hardware, workload, layout)
    if first is None:
        return
    yield first
    state = first.memory.weights + first.memory.gradients + first.memory.optimizer
    if first.fits or state > usable_bytes(hardware):
        return
    for factor in _MICROBATCHES:
        smaller = layout.replace(microbatches=factor * layout.microbatches)
        for remat in REMATS:
            one = _priced(config, hardware, workload, smaller.replace(remat=remat))
            if one is None:
                return
            if one.fits:
                yield one
                break


def _priced(config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout) -> Candidate | None:
    """The layout's price, None where it does not divide or has too few sequences."""
    try:
        return price(config, hardware, workload, layout)
    except LayoutError:
        return None


def _typed(mesh: Layout, planned: Layout) -> Layout:
    return mesh.replace(weights_dtype=planned.weights_dtype, compute_dtype=planned.compute_dtype)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _torus_sizes(network: Torus) -> Iterator[tuple[int, ...]]:
    """Slices from a cube of four upward, the shortest side doubled each time, as far as a pod goes."""
    sizes = [min(4, most) for most in sorted(network.pod)]
    while True:
        yield tuple(sizes)
        growing = [n for n, most in enumerate(sorted(network.pod)) if sizes[n] * 2 <= most]
        if not growing:
            return
        shortest = min(growing, key=lambda n: (sizes[n], -n))
        sizes[shortest] *= 2


def _node_counts(hardware: Hardware) -> Iterator[tuple[int, ...]]:
    """A single node and its doublings, to four times the machine."""
    nodes, (own, domain) = 1, hardware.dims
    while nodes <= 4 * own:
        yield (nodes, domain)
        nodes *= 2


def _around(machines: list[Hardware], own: Hardware) -> list[Hardware]:
    """At most MAX_SHAPES neighbours in size, about two thirds of them smaller."""
    place = machines.index(own)
    first = max(0, min(place - 2 * MAX_SHAPES // 3, len(machines) - MAX_SHAPES))
    return machines[first : first + MAX_SHAPES]
