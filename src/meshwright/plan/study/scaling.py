"""The usual strategies against batch size and number of chips: the best priced layout of each kind.

Every point is a candidate of the planner, with the compute, communication and memory that a search would
find; no closed form is used. A strategy is a kind of mesh:

    DP          data only: whole weights on every chip
    FSDP        the widest fsdp that divides the model, data for the rest
    TP          tensor > 1, whole weights over data
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
from meshwright.layout.axes.tensor import tensor_degrees
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan.fastest import Fastest
from meshwright.plan.given import NOT_SEARCHED
from meshwright.plan.space import Space
from meshwright.plan.train import price, well_placed
from meshwright.units import divisors

STRATEGIES = ("DP", "FSDP", "TP", "FSDP + TP")
BEST = "best"
MAX_SHAPES = 4  # machines, and so positions of the slider over chips
_SPAN = 16  # batches range from the planned one / 16 to 16 times that
_MAX_FSDP = 2  # degrees of fsdp tried for one degree of tensor


@dataclass(frozen=True)
class ScalingPoint:
    """The best candidate of a strategy at one batch size."""

    strategy: str
    num_sequences: int
    candidate: Candidate


@dataclass(frozen=True)
class ScalingSweep:
    """All points on one machine. A strategy that cannot run at some batch size has no point there."""

    hardware: Hardware
    planned_tokens: int
    points: tuple[ScalingPoint, ...]

    def of(self, strategy: str) -> list[ScalingPoint]:
        """The points of one strategy, by batch size."""
        return [point for point in self.points if point.strategy == strategy]


def batches(num_sequences: int, num_chips: int) -> list[int]:
    """Numbers of sequences around the planned one, each about twice the one before.

    The others are the number of chips times or over powers of two, so that every shard has whole sequences.

    >>> batches(48, 32)
    [4, 8, 16, 32, 48, 64, 128, 256, 512]
    """
    whole = num_chips
    while whole % 2 == 0 and whole > num_sequences / _SPAN:
        whole //= 2
    doubled = [whole * 2**n for n in range(64) if whole * 2**n <= num_sequences * _SPAN]
    others = [number for number in doubled if number * _SPAN >= num_sequences]
    return sorted({num_sequences, *(n for n in others if not 0.8 < n / num_sequences < 1.25)})


def machine_sizes(hardware: Hardware) -> list[Hardware]:
    """Smaller and larger machines of the same chip, and this one; a host has only itself.

    A torus grows from a cube by doubling its shortest side, which keeps the most rings closed.
    GPUs grow by doubling their nodes.
    """
    network = hardware.chip.network
    if isinstance(network, SharedMemory) or hardware.num_slices > 1:
        return [hardware]
    known = _torus_sizes(network) if isinstance(network, Torus) else _node_counts(hardware)
    others = [sizes for sizes in known if prod(sizes) != hardware.num_chips]
    name = hardware.spec.split(":")[0]
    machines = [catalog.load(f"{name}:{'x'.join(map(str, sizes))}") for sizes in others]
    machines = sorted([*machines, hardware], key=lambda machine: machine.num_chips)
    # About two thirds of the neighbours are smaller.
    first = max(0, min(machines.index(hardware) - 2 * MAX_SHAPES // 3, len(machines) - MAX_SHAPES))
    return machines[first : first + MAX_SHAPES]


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
        for shards in [d for d in divisors(rest)[1:] if space.config.d_model % d == 0][-_MAX_FSDP:]:
            yield base.replace(data=rest // shards, fsdp=shards, tensor=tensor)


def best_of(space: Space, chosen: Iterable[Layout]) -> Candidate | None:
    """The fastest layout that fits, each mesh under the schedules that a search considers.

    If none fits, the layout that lacks the least memory; None if no mesh divides the batch.
    """
    layouts = Fastest(space.groups(chosen))
    fastest = [choice for _, choice in islice(layouts, 1)]
    best = fastest or nsmallest(1, layouts.lacking, key=lambda choice: choice.bytes_per_chip)
    if not best:
        return None
    return well_placed(price(space.config, space.hardware, space.workload, best[0].layout))


def rank(candidate: Candidate) -> tuple[float, float]:
    """The sort key of a candidate: layouts that fit by time, then the others by memory."""
    return (0 if candidate.fits else candidate.memory.total, candidate.step_seconds)


def scaling_sweep(
    config: ModelConfig, hardware: Hardware, workload: Workload, base: Layout, searched: Iterable[Layout]
) -> ScalingSweep:
    """Every strategy at every batch size around the planned one.

    base: a layout of one chip, for dtypes and the settings that are not searched. searched: layouts that a
    search ranks first; "best" is the best of them and of all strategies.
    """
    points: list[ScalingPoint] = []
    ranked = list(dict.fromkeys(without_schedule(layout) for layout in searched))
    for num_sequences in batches(workload.num_sequences, hardware.num_chips):
        space = Space(config, hardware, Workload(num_sequences, workload.seq_len), base)
        by_strategy = {strategy: best_of(space, meshes(space, strategy)) for strategy in STRATEGIES}
        # Each mesh on its own: together, the many schedules of one mesh would push out the others.
        rivals = (*by_strategy.values(), *(best_of(space, [mesh]) for mesh in ranked))
        by_strategy[BEST] = min((one for one in rivals if one), key=rank, default=None)
        points += [ScalingPoint(name, num_sequences, one) for name, one in by_strategy.items() if one]
    return ScalingSweep(hardware, workload.num_tokens, tuple(points))


def without_schedule(layout: Layout) -> Layout:
    """The layout without its schedule, as a search starts from it."""
    if layout.spmd_stages:
        return layout.replace(microbatches=2, remat="none")
    return layout.replace(microbatches=1, schedule="1f1b", interleave=1, remat="none")


def base_of(layout: Layout) -> Layout:
    """A layout of one chip with the dtypes of `layout` and the other settings that are not searched."""
    kept = ("weights_dtype", "compute_dtype", *NOT_SEARCHED)
    return Layout.of().replace(**{name: layout.word(name) for name in kept})


def _torus_sizes(network: Torus) -> Iterator[tuple[int, ...]]:
    """Slices from a cube of side 4 to the whole pod, the shortest side doubled each time."""
    sizes = [min(4, most) for most in sorted(network.pod)]
    while True:
        yield tuple(sizes)
        growing = [n for n, most in enumerate(sorted(network.pod)) if sizes[n] * 2 <= most]
        if not growing:
            return
        shortest = min(growing, key=lambda n: (sizes[n], -n))
        sizes[shortest] *= 2


def _node_counts(hardware: Hardware) -> Iterator[tuple[int, ...]]:
    """1, 2, 4, ... nodes, to four times the machine."""
    num_nodes, domain = hardware.dims
    return ((2**n, domain) for n in range((4 * num_nodes).bit_length()))
