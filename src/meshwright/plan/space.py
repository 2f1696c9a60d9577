"""The layouts that a search considers, each with its memory and its time.

A layout is a mesh (how many chips each axis takes), a microbatch, a schedule and a remat policy.
Meshes that do not divide the model, the sequence or the batch are left out. Those that have the same
operations and collectives are recorded and priced together (cost/many.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import ceil, floor
from typing import NamedTuple

from meshwright.cost.graph import Graph
from meshwright.cost.many import Family, Member, Stages
from meshwright.cost.ops import record_loss
from meshwright.cost.recorder import Shape
from meshwright.errors import LayoutError
from meshwright.hardware.chip import Torus
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.pipeline import SCHEDULES
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions
from meshwright.plan.batch import nearest_multiple
from meshwright.plan.given import Condition

# Splitting a sequence further leaves too few queries a device for a matmul's rows.
MAX_CONTEXT, _MIN_POSITIONS = 64, 512
MAX_TENSOR = 64
# More stages than this have bubbles or activations that no batch of today's pays for.
_MAX_PIPE = 64
# So many tokens fill a chip's matrix units: a larger pass saves little and holds more.
_MAX_PASS_TOKENS = 65_536


# The remat policies that a search tries, what recomputes least first. "alternate", which PyTorch's programs
# have, is priced where it is asked for.
SEARCHED_REMATS = ("none", "attention", "matmuls", "full")
# Fields of a layout that are not of its mesh.
_OF_SCHEDULE = ("microbatches", "schedule", "interleave", "remat")


class Choice(NamedTuple):
    """One layout for a batch that it divides, whose price is not itemised yet.

    bytes_per_chip: at the peak. least_seconds: of its step without the pipeline's bubble. stages, place:
    where its price is.
    """

    least_seconds: float
    bytes_per_chip: float
    mesh: Layout
    microbatches: int
    num_sequences: int
    schedule: str
    interleave: int
    remat: str
    stages: Stages
    place: int

    @property
    def seconds(self) -> float:
        """Of its step."""
        slowdown = self.stages.family.chip.step.slowdown
        return slowdown * self.stages.step_seconds(self.place, self.schedule)

    @property
    def layout(self) -> Layout:
        return self.mesh.replace(
            microbatches=self.microbatches,
            schedule=self.schedule,
            interleave=self.interleave,
            remat=self.remat,
        )


class Space:
    """The layouts of one model and machine that share `base`'s dtypes, each for a batch that it divides.

    batch_within: the share by which that batch may differ from the workload's. given: what every layout
    must meet.
    """

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        workload: Workload,
        base: Layout,
        *,
        batch_within: float = 0.0,
        given: Sequence[Condition] = (),
    ) -> None:
        self.config, self.hardware, self.workload, self.base = config, hardware, workload, base
        asked = workload.num_sequences
        self._batches = range(ceil(asked * (1 - batch_within)), floor(asked * (1 + batch_within)) + 1)
        self._of_mesh = [condition for condition in given if condition.field not in _OF_SCHEDULE]
        self._of_schedule = [condition for condition in given if condition.field in _OF_SCHEDULE]
        self._given_schedule = {condition.field for condition in self._of_schedule}
        self.sizes = dimensions(config)

    # Meshes

    def meshes(self) -> Iterator[Layout]:
        """Every division of the chips into axes that divides the model and the sequence."""
        for tensor in self.tensors:
            for pipe in self._pipes(self.hardware.num_chips // tensor):
                for context in self._contexts(self.hardware.num_chips // tensor // pipe):
                    ranks = self.hardware.num_chips // tensor // pipe // context
                    if ranks > self._batches[-1]:
                        continue
                    degrees = {"tensor": tensor, "pipe": pipe, "context": context}
                    for sharing in self._data_ranks(ranks, pipe):
                        yield from filter(self._is_given, self._variants(degrees | sharing))

    def _is_given(self, mesh: Layout) -> bool:
        stage = {"zero": mesh.zero_stage}
        return all(one.holds(stage.get(one.field, getattr(mesh, one.field))) for one in self._of_mesh)

    @cached_property
    def tensors(self) -> list[int]:
        """Degrees of `tensor` that divide heads and feed-forward (the vocabulary may be padded)."""
        letters = [letter for letter in "NKFMU" if self.sizes.get(letter)]
        widest = min(self.hardware.num_chips, MAX_TENSOR)
        return [
            degree
            for degree in divisors(self.hardware.num_chips)
            if degree <= widest and all(self.sizes[letter] % degree == 0 for letter in letters)
        ]

    def _pipes(self, chips: int) -> list[int]:
        most = min(_MAX_PIPE, self.config.num_layers)
        return [degree for degree in divisors(chips) if degree <= most]

    def _contexts(self, chips: int) -> list[int]:
        return [d for d in divisors(chips) if d == 1 or self.splits_sequences(d)]

    def splits_sequences(self, context: int) -> bool:
        """Whether shards of a sequence divide and are long enough."""
        seq_len = self.workload.seq_len
        return seq_len % context == 0 and context <= min(MAX_CONTEXT, seq_len // _MIN_POSITIONS)

    def _data_ranks(self, ranks: int, pipe: int) -> Iterator[dict[str, int]]:
        """How the data ranks share weights, gradients and optimizer.

        Stages add up the gradients of microbatches that are in flight together: ZeRO 2 is not for them.
        """
        yield {"data": ranks}
        for shared in divisors(ranks)[1:]:
            if self.config.d_model % shared == 0:
                yield {"data": ranks // shared, "fsdp": shared}
        if ranks > 1 and self.config.d_model % ranks == 0:
            yield {"data": ranks, "zero": 1}
            if pipe == 1:
                yield {"data": ranks, "zero": 2}

    def _variants(self, degrees: Mapping[str, int]) -> Iterator[Layout]:
        """With and without sequence parallelism; experts over more or fewer devices; D split too."""
        tensor, ranks = degrees["tensor"], degrees["data"] * degrees.get("fsdp", 1)
        experts = _spread(divisors(self.sizes.get("E", 1)), 4)
        divides = tensor > 1 and self.workload.seq_len % (degrees["context"] * tensor) == 0
        # Experts get each token once only where sequences are split over `tensor` as well.
        splits = [True] if divides and self.config.moe else [False, True] if divides else [False]
        for split in splits:
            for expert in experts:
                if expert > ranks * tensor:
                    break
                try:
                    chosen = self.base.replace(**degrees, sequence_parallel=split, expert=expert)
                except LayoutError:  # no data axis to cut so many devices out of
                    continue
                yield chosen
                if self._may_split_d(chosen):
                    yield chosen.replace(tensor=tensor // 2, tensor2=2)

    def _may_split_d(self, mesh: Layout) -> bool:
        """Two tensor axes take two axes of a torus; a switch has one."""
        torus = isinstance(self.hardware.chip.network, Torus)
        return torus and mesh.tensor >= 8 and mesh.tensor % 2 == 0 and mesh.expert == 1

    # Schedules

    def choices(self, meshes: Iterable[Layout]) -> Iterator[Choice]:
        """Microbatches by schedules of meshes, each with the remat policy that recomputes least to fit."""
        families: dict[tuple, list[Member]] = {}
        for mesh in meshes:
            for microbatches, num_sequences in self._microbatches(mesh):
                key = (mesh.pattern, microbatches == 1)
                families.setdefault(key, []).append(Member(mesh, microbatches, num_sequences))
        for members in families.values():
            found = self._choices(members)
            yield from filter(self._has_given_schedule, found) if self._of_schedule else found

    def _microbatches(self, mesh: Layout) -> Iterator[tuple[int, int]]:
        """(microbatches, sequences) of steps: as many whole sequences for each microbatch of a data rank.

        Interleaved schedules take microbatches in rounds of `pipe`.
        """
        shards, found = mesh.num_batch_shards, {}
        for size in self._microbatch_sizes(mesh):
            for rounds in {1, mesh.pipe}:
                num_sequences = nearest_multiple(self.workload.num_sequences, shards * size * rounds)
                if num_sequences in self._batches:
                    found[num_sequences // (shards * size), num_sequences] = None
        yield from (pair for pair in found if pair[0] > 1 or mesh.pipe == 1)

    def _microbatch_sizes(self, mesh: Layout) -> list[int]:
        """Sequences of a microbatch on one data rank, about twice as many each.

        Those that divide the rank's share, and powers of two where these are far apart.
        """
        shards = mesh.num_batch_shards
        share = max(1, nearest_multiple(self.workload.num_sequences, shards) // shards)
        dividing = divisors(share) if "microbatches" in self._given_schedule else _spread(divisors(share), 2)
        powers = (2**n for n in range(share.bit_length()))
        between = [power for power in powers if not any(power < 2 * d < 4 * power for d in dividing)]
        most = max(1, _MAX_PASS_TOKENS * mesh.context // self.workload.seq_len)
        return sorted(size for size in (*dividing, *between) if size <= most)

    def _choices(self, members: list[Member]) -> Iterator[Choice]:
        """Of members of one family."""
        flash, seq_len = runs_flash(self.hardware), self.workload.seq_len
        family = Family(self.config, self.hardware, members, seq_len, flash_attention=flash)
        for pipe, rows in family.rows.items():
            places: dict[tuple[str, int], list[int]] = {}
            for place, row in enumerate(rows):
                for schedule in self._schedules(pipe, members[row].microbatches):
                    places.setdefault(schedule, []).append(place)
            for (schedule, interleave), those in places.items():
                yield from self._with_remats(family, pipe, schedule, interleave, those)

    def _has_given_schedule(self, choice: "Choice") -> bool:
        return all(one.holds(getattr(choice, one.field)) for one in self._of_schedule)

    def _schedules(self, pipe: int, microbatches: int) -> list[tuple[str, int]]:
        """(schedule, chunks a stage), of those that exist."""
        if pipe == 1:
            return [("1f1b", 1)]
        found = [("1f1b", 1), ("zb-h1", 1)]
        found += [(name, 1) for name in ("zb-v", "dualpipe") if SCHEDULES[name].exists(pipe, microbatches)]
        if microbatches % pipe == 0:
            found += [("interleaved", v) for v in self._chunks(pipe)]
        return found

    def _chunks(self, pipe: int) -> list[int]:
        """Chunks a stage: two, the fewest that divide the layers, and a chunk for every layer."""
        layers = self.config.num_layers
        # The first chunk may hold the embedding alone, and the last the head.
        most = min(-(-layers // pipe), (layers + 2) // pipe)
        if "interleave" in self._given_schedule:
            return list(range(2, most + 1))
        even = divisors(layers // pipe)[1:2] if layers % pipe == 0 else []
        return sorted({v for v in (2, *even, most) if 2 <= v <= most})

    def _with_remats(
        self, family: Family, pipe: int, schedule: str, interleave: int, places: list[int]
    ) -> Iterator[Choice]:
        """Of the members at `places` of those with `pipe` stages."""
        usable, slowdown = usable_bytes(self.hardware), self.hardware.chip.step.slowdown
        for remat in self._remats_tried:
            stages = family.stages(schedule, pipe, interleave, remat)
            needed = stages.needed_bytes(places, schedule)
            least = slowdown * stages.least_seconds(places, schedule)
            for place, seconds, num_bytes in zip(places, least.tolist(), needed.tolist(), strict=True):
                mesh, microbatches, num_sequences = family.members[stages.rows[place]]
                yield Choice(
                    seconds,
                    num_bytes,
                    mesh,
                    microbatches,
                    num_sequences,
                    schedule,
                    interleave,
                    remat,
                    stages,
                    place,
                )
            if remat == "attention":  # which is not run: what fits so is tried with the next too
                continue
            places = [place for place, num_bytes in zip(places, needed, strict=True) if num_bytes > usable]
            if not places:
                return

    @cached_property
    def _remats_tried(self) -> list[str]:
        """The policies that are searched, or one that is given. Without scores `attention` is `none`."""
        conditions = [one for one in self._of_schedule if one.field == "remat"]
        asked = [str(one.value) for one in conditions if one.comparison == "="]
        tried = [remat for remat in asked or SEARCHED_REMATS if all(one.holds(remat) for one in conditions)]
        return [remat for remat in tried if asked or remat != "attention" or not runs_flash(self.hardware)]


def record(
    config: ModelConfig, hardware: Hardware, layout: Layout, num_sequences: float, seq_len: int
) -> Graph:
    """The graph of one microbatch of so many sequences, over all batch shards."""
    shape = Shape(num_sequences, seq_len, seq_len)
    return record_loss(config, layout, shape, flash_attention=runs_flash(hardware))


def runs_flash(hardware: Hardware) -> bool:
    """Whether attention runs a kernel that keeps scores on chip: all but XLA on CPU has one."""
    return hardware.chip.kind != "cpu"


# HBM that the runtime and the compiler keep for themselves.
RESERVED_SHARE = 0.05


def usable_bytes(hardware: Hardware) -> int:
    """HBM of one chip less what the runtime keeps."""
    return round(hardware.chip.hbm_bytes * (1 - RESERVED_SHARE))


def _spread(degrees: list[int], factor: int) -> list[int]:
    """Of ascending degrees every one that is at least `factor` times the one before, and the last.

    >>> _spread([1, 2, 4, 8, 16, 32, 64, 128], 4)
    [1, 4, 16, 64, 128]
    """
    chosen = degrees[:1]
    for degree in degrees:
        if degree >= factor * chosen[-1]:
            chosen.append(degree)
    return list(dict.fromkeys([*chosen, degrees[-1]]))


def divisors(number: int) -> list[int]:
    """In ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
