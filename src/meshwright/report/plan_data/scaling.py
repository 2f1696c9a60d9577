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
from heapq import nsmallest
from itertools import islice
from math import prod

from meshwright.hardware import catalog
from meshwright.hardware.chip import SharedMemory, Torus
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.axes import divisors
from meshwright.layout.axes.tensor import tensor_degrees
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan.fastest import Fastest
from meshwright.plan.given import NOT_SEARCHED
from meshwright.plan.space import Space
from meshwright.plan.train import price, well_placed

STRATEGIES = ("DP", "FSDP", "TP", "FSDP + TP")
BEST = "best"
MAX_SHAPES = 4  # positions of a slider over chips
_SPAN = 16  # batches from the planned one over this to the planned one times this
_MAX_FSDP = 2  # widths of fsdp tried for one width of tensor


@dataclass(frozen=True)
class ScalingPoint:
    """A strategy at one batch: the candidate that stands for it."""

    strategy: str
    num_sequences: int
    candidate: Candidate


@dataclass(frozen=True)
class ScalingSweep:
    """All points on one machine, by strategy and then batch; what cannot run has no point."""

    hardware: Hardware
    planned_tokens: int
    points: tuple[ScalingPoint, ...]

    def of(self, strategy: str) -> list[ScalingPoint]:
        """The points of one strategy, by batch."""
        found = [point for point in self.points if point.strategy == strategy]
        return sorted(found, key=lambda point: point.num_sequences)


def batches(num_sequences: int, num_chips: int) -> list[int]:
    """Numbers of sequences around the planned one, and it: each twice the one before.

    The others are the chips by powers of two, so that shards of a batch are of whole sequences.

    >>> batches(48, 32)
    [4, 8, 16, 32, 48, 64, 128, 256, 512]
    """
    whole = num_chips
    while whole % 2 == 0 and whole > num_sequences / _SPAN:
        whole //= 2
    doubled = [whole * 2**n for n in range(64) if whole * 2**n <= num_sequences * _SPAN]
    others = [number for number in doubled if number * _SPAN >= num_sequences]
    return sorted({num_sequences, *(n for n in others if not 0.8 < n / num_sequences < 1.25)})


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


def meshes(space: Space, strategy: str) -> Iterator[Layout]:
    """The meshes of a strategy on the chips of `space` that divide the model."""
    chips, base = space.hardware.num_chips, space.base
    if strategy == "DP":
        yield base.replace(data=chips)
        return
    for tensor in [1] if strategy == "FSDP" else tensor_degrees(space.config, chips)[1:]:
        rest = chips // tensor
        if strategy == "TP":
            yield base.replace(data=rest, tensor=tensor)
            continue
        wide = [shards for shards in divisors(rest)[1:] if space.config.d_model % shards == 0]
        for shards in wide[-_MAX_FSDP:]:
            yield base.replace(data=rest // shards, fsdp=shards, tensor=tensor)


def best_of(space: Space, chosen: Iterable[Layout]) -> Candidate | None:
    """The fastest that fits of these meshes, each under the schedules that a search considers.

    Where none fits, the one that lacks least memory. None where no mesh takes the batch.
    """
    layouts = Fastest(space.groups(chosen))
    fastest = [choice for _, choice in islice(layouts, 1)]
    found = fastest or nsmallest(1, layouts.lacking, key=lambda choice: choice.bytes_per_chip)
    if not found:
        return None
    priced = price(space.config, space.hardware, space.workload, found[0].layout)
    return well_placed(priced)


def rank(candidate: Candidate) -> tuple[float, float]:
    """The sort key of a candidate: layouts that fit come first, by time; the others follow, by memory."""
    return (0 if candidate.fits else candidate.memory.total, candidate.step_seconds)


def scaling_sweep(
    config: ModelConfig, hardware: Hardware, workload: Workload, base: Layout, searched: Iterable[Layout]
) -> ScalingSweep:
    """Every strategy at every batch around the workload's, in the dtypes of `base`, a Layout of one chip.

    "best" is the best of all strategies and of the meshes `searched` (those a search ranks first).
    """
    points: list[ScalingPoint] = []
    ranked = list(dict.fromkeys(without_schedule(layout) for layout in searched))
    for num_sequences in batches(workload.num_sequences, hardware.num_chips):
        space = Space(config, hardware, Workload(num_sequences, workload.seq_len), base)
        found = {strategy: best_of(space, meshes(space, strategy)) for strategy in STRATEGIES}
        # Each mesh by itself: the many schedules of one would leave no other a place among the priced.
        rivals = (*found.values(), *(best_of(space, [mesh]) for mesh in ranked))
        found[BEST] = min((one for one in rivals if one), key=rank, default=None)
        points += [ScalingPoint(name, num_sequences, one) for name, one in found.items() if one]
    return ScalingSweep(hardware, workload.num_tokens, tuple(points))


def without_schedule(layout: Layout) -> Layout:
    """The layout without its schedule, as a search takes it; that of lanes has rules of its own."""
    if layout.stages_alike:
        return layout.replace(microbatches=2, remat="none")
    return layout.replace(microbatches=1, schedule="1f1b", interleave=1, remat="none")


def base_of(layout: Layout) -> Layout:
    """A layout of one chip with the dtypes of `layout` and what else a search does not choose."""
    kept = ("weights_dtype", "compute_dtype", *NOT_SEARCHED)
    return Layout.of().replace(**{name: layout.word(name) for name in kept})


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
