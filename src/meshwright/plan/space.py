"""The layouts that a search considers, each with its memory and a time that it cannot beat.

A layout is a mesh (how many chips each axis takes), a microbatch, a schedule and a remat policy.
Meshes that do not divide the model, the sequence or the batch are left out. The bound is compute at
the chip's rates with what a layer waits for and the schedule's bubble, or the weights' gathers alone.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import NamedTuple

from meshwright.cost.collectives import collective_seconds
from meshwright.cost.graph import Graph, Segment, Transfer
from meshwright.cost.memory import Held, held_bytes, state_bytes
from meshwright.cost.ops import record_loss
from meshwright.cost.passes import Dtypes, passes
from meshwright.cost.pipeline import PassSeconds, Times, check_schedule, makespan, routes
from meshwright.cost.recorder import Shape
from meshwright.cost.stages import alive_microbatches, layers_of_stages, num_chunks, stage_ends
from meshwright.cost.step import at_step_rates, transfer_price
from meshwright.errors import LayoutError
from meshwright.hardware.chip import Torus
from meshwright.hardware.topology import Hardware, Placement
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions
from meshwright.plan_file import Workload

# Splitting a sequence further leaves too few queries a device for a matmul's rows.
MAX_CONTEXT, _MIN_POSITIONS = 64, 512
MAX_TENSOR = 64
# More stages than this have bubbles or activations that no batch of today's pays for.
_MAX_PIPE = 64
# So many tokens fill a chip's matrix units: a larger pass saves little and holds more.
_MAX_PASS_TOKENS = 65_536


# Bytes of (weights, gradients, optimizer) of the first and the last stage.
_States = dict[int, tuple[int, int, int]]
# The remat policies that a search tries, what recomputes least first. "alternate", which PyTorch's programs
# have, is priced where it is asked for.
SEARCHED_REMATS = ("none", "attention", "matmuls", "full")
# Fields of a layout that are not of its mesh.
_OF_SCHEDULE = ("microbatches", "schedule", "interleave", "remat")


class Choice(NamedTuple):
    """One layout, not yet priced.

    bytes_per_chip: at the peak. least_seconds: what its step takes at least.
    """

    least_seconds: float
    bytes_per_chip: float
    mesh: Layout
    microbatches: int
    schedule: str
    interleave: int
    remat: str

    @property
    def layout(self) -> Layout:
        return self.mesh.replace(
            microbatches=self.microbatches,
            schedule=self.schedule,
            interleave=self.interleave,
            remat=self.remat,
        )


class Space:
    """The layouts of one model, machine and batch that share `base`'s dtypes.

    runnable: only what `nn/` runs. given: degrees and schedule that every layout must have.
    """

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        workload: Workload,
        base: Layout,
        *,
        runnable: bool,
        given: Mapping[str, object] | None = None,
    ) -> None:
        self.config, self.hardware, self.workload = config, hardware, workload
        self.base, self.runnable = base, runnable
        self._of_mesh = {key: value for key, value in (given or {}).items() if key not in _OF_SCHEDULE}
        self._of_schedule = {key: value for key, value in (given or {}).items() if key in _OF_SCHEDULE}
        self.sizes = dimensions(config)
        self._local: dict[tuple[Layout, float], _Local] = {}

    # Meshes

    def meshes(self) -> Iterator[Layout]:
        """Every division of the chips into axes that divides the model, the batch and the sequence."""
        for tensor in self.tensors:
            for pipe in self._pipes(self.hardware.num_chips // tensor):
                for context in self._contexts(self.hardware.num_chips // tensor // pipe):
                    ranks = self.hardware.num_chips // tensor // pipe // context
                    if ranks > self.workload.num_sequences:
                        continue
                    degrees = {"tensor": tensor, "pipe": pipe, "context": context}
                    for sharing in self._data_ranks(ranks, pipe):
                        yield from filter(self._is_given, self._variants(degrees | sharing))

    def _is_given(self, mesh: Layout) -> bool:
        stage = {"zero": mesh.zero_stage}
        return all(stage.get(key, getattr(mesh, key)) == value for key, value in self._of_mesh.items())

    @cached_property
    def tensors(self) -> list[int]:
        """Degrees of `tensor` that divide heads and feed-forward (the vocabulary may be padded)."""
        letters = [letter for letter in "NKFMU" if self.sizes.get(letter)]
        letters += ["V"] if self.runnable else []
        widest = min(self.hardware.num_chips, MAX_TENSOR)
        return [
            degree
            for degree in divisors(self.hardware.num_chips)
            if degree <= widest and all(self.sizes[letter] % degree == 0 for letter in letters)
        ]

    def _pipes(self, chips: int) -> list[int]:
        most = 1 if self.runnable else min(_MAX_PIPE, self.config.num_layers)
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
        experts = [1] if self.runnable else _spread(divisors(self.sizes.get("E", 1)))
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
        return torus and not self.runnable and mesh.tensor >= 8 and mesh.tensor % 2 == 0 and mesh.expert == 1

    # Schedules

    def choices(self, mesh: Layout) -> Iterator[Choice]:
        """Microbatches by schedules of one mesh, each with the remat policy that recomputes least to fit."""
        per_shard = self.workload.num_sequences / mesh.num_batch_shards
        states: dict[object, _States] = {}
        placement = at_step_rates(self.hardware).place(mesh.mesh)
        sequences, few = 1.0, self._few(mesh)
        most = max(1.0, _MAX_PASS_TOKENS * mesh.context / self.workload.seq_len)
        while sequences <= min(per_shard, most):
            microbatches = int(per_shard / sequences)
            if microbatches == 1 and mesh.pipe > 1:
                break
            local = self._local_of(few, mesh, sequences)
            sequences *= 2
            waiting = microbatches * local.fsdp_seconds(mesh, placement)
            for schedule, interleave in self._schedules(mesh.pipe, microbatches):
                alike = stage_ends(schedule, mesh.pipe, 0), len(routes(schedule, mesh.pipe))
                if alike not in states:
                    states[alike] = self._states(mesh, schedule)
                found = self._remats(mesh, microbatches, schedule, interleave, local, states[alike], waiting)
                yield from found if not self._of_schedule else filter(self._has_given_schedule, found)

    def _states(self, mesh: Layout, schedule: str) -> "_States":
        return {s: state_bytes(self.config, mesh, s, schedule) for s in {0, mesh.pipe - 1}}

    def _has_given_schedule(self, choice: "Choice") -> bool:
        return all(getattr(choice, key) == value for key, value in self._of_schedule.items())

    def _schedules(self, pipe: int, microbatches: int) -> list[tuple[str, int]]:
        """(schedule, chunks a stage), of those that exist."""
        if pipe == 1:
            return [("1f1b", 1)]
        found = [("1f1b", 1), ("zb-h1", 1)]
        found += [(name, 1) for name in ("zb-v", "dualpipe") if _exists(name, pipe, microbatches)]
        if microbatches % pipe == 0 and self.config.num_layers % pipe == 0:
            chunks = divisors(self.config.num_layers // pipe)[1:]
            few = chunks if "interleave" in self._of_schedule else dict.fromkeys(chunks[:1] + chunks[-1:])
            found += [("interleaved", v) for v in few]
        return found

    def _remats(
        self,
        mesh: Layout,
        microbatches: int,
        schedule: str,
        interleave: int,
        local: "_Local",
        states: "_States",
        waiting: float,
    ) -> Iterator[Choice]:
        usable, pipe = usable_bytes(self.hardware), mesh.pipe
        alive = {s: alive_microbatches(schedule, pipe, microbatches, interleave, s) for s in states}
        given = self._of_schedule.get("remat")
        for remat in [str(given)] if given else local.remats:
            if remat in ("attention", "alternate") and self.runnable:
                continue
            held = local.held(schedule, pipe, interleave, remat)
            room = {s: gradients if microbatches == 1 else 0 for s, (_, gradients, _) in states.items()}
            needed = max(sum(states[s]) + held[s].saved(alive[s]) + held[s].buffers(room[s]) for s in states)
            least = max(waiting, local.least_seconds(remat, schedule, pipe, microbatches, interleave))
            least *= self.hardware.chip.step.slowdown
            yield Choice(least, needed, mesh, microbatches, schedule, interleave, remat)
            if needed <= usable:
                return

    def _few(self, mesh: Layout) -> Layout:
        """What meshes share that differ in data ranks and stages alone, and in whether they gather."""
        shared = "fsdp" if mesh.zero_stage == 3 else "data"
        cut = mesh.mesh.sizes.get("expert", 1)
        # Three: twice `cut` could be the whole of `expert` where that takes two of `tensor` as well.
        ranks = {"data": 1, "fsdp": 1} | {shared: cut * (1 if mesh.num_batch_shards == cut else 3)}
        return mesh.replace(**ranks, zero=None, pipe=1)

    def _local_of(self, few: Layout, mesh: Layout, sequences: float) -> "_Local":
        key = (few, sequences)
        if key not in self._local:
            self._local[key] = _Local(self.config, self.hardware, few, mesh, sequences, self.workload.seq_len)
        return self._local[key]


class _Local:
    """One microbatch on one chip: what it saves, and how long it computes and waits for its group's chips.

    few: the layout that it is recorded under. mesh: one of those that share it: the axes inside a layer
    (tensor, context, expert) are innermost, so they lie on the same links in all.
    """

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        few: Layout,
        mesh: Layout,
        sequences: float,
        seq_len: int,
    ) -> None:
        self.chip, self.dtypes, self.num_layers = hardware.chip, Dtypes.of(few), config.num_layers
        # Without scores in memory `attention` is the same as `none`.
        self.remats = [r for r in SEARCHED_REMATS if r != "attention" or not runs_flash(hardware)]
        self.graph = record(config, hardware, few, sequences * few.num_batch_shards, seq_len)
        self.placement = at_step_rates(hardware).place(mesh.mesh)
        self._seconds: dict[str, tuple[PassSeconds, float]] = {}
        self._held: dict[tuple[str, int, int, str], dict[int, Held]] = {}

    def held(self, schedule: str, pipe: int, interleave: int, remat: str) -> dict[int, Held]:
        """Of the first and the last stage."""
        key = (schedule, pipe, interleave, remat)
        if key not in self._held:
            self._held[key] = {
                s: held_bytes(self.graph, pipe, interleave, s, stage_ends(schedule, pipe, s), remat)
                for s in {0, pipe - 1}
            }
        return self._held[key]

    def least_seconds(
        self, remat: str, schedule: str, pipe: int, microbatches: int, interleave: int
    ) -> float:
        """Compute and waits of all microbatches, and the bubble of their schedule."""
        layers, rest = self._of_layers(remat)
        if pipe == 1:
            return microbatches * (layers.total + rest)
        chunks = num_chunks(schedule, interleave)
        share = max(layers_of_stages(self.num_layers, pipe, interleave)) / self.num_layers / chunks
        body = PassSeconds(*(seconds * share for seconds in layers))
        return makespan(schedule, pipe, microbatches, interleave, Times(body))

    def _of_layers(self, remat: str) -> tuple[PassSeconds, float]:
        """Seconds of all layers, and of the rest, for one microbatch."""
        if remat not in self._seconds:
            forward = backward = put_off = rest = 0.0
            for segment in self.graph.segments:
                for one in passes(segment, remat, self.dtypes, self.chip):
                    seconds = one.seconds + sum(map(self._waits, one.transfers))
                    if not segment.source:
                        rest += segment.count * seconds
                    elif one.direction == "forward":
                        forward += segment.count * seconds
                    else:
                        backward += segment.count * (seconds - one.put_off)
                        put_off += segment.count * one.put_off
            self._seconds[remat] = PassSeconds(forward, backward, put_off), rest
        return self._seconds[remat]

    def _waits(self, transfer: Transfer) -> float:
        """Seconds that compute waits for a transfer inside the layer."""
        if not transfer.critical or not set(transfer.axes) <= _INNERMOST:
            return 0.0
        return self.chip.step.waiting * transfer_price(transfer, self.placement).seconds

    def fsdp_seconds(self, mesh: Layout, placement: Placement) -> float:
        """Seconds of one microbatch's gathers of weights, which compute may hide but not shorten."""
        if mesh.fsdp == 1 or mesh.zero_stage != 3:
            return 0.0
        layers = [(s.count, self._gathered(s)) for s in self.graph.segments if s.source]
        largest = max(gathered for _, gathered in layers)
        one = collective_seconds("all_gather", largest, ("fsdp",), placement).seconds
        return 2 * one * sum(count * gathered / largest for count, gathered in layers) / mesh.pipe

    @staticmethod
    @lru_cache(maxsize=16384)
    def _gathered(segment: Segment) -> float:
        """Bytes of weights that one run of a segment gathers."""
        transfers = (t for node in segment.nodes if node.kind == "gather" for t in node.forward_transfers)
        return sum(t.gathered_bytes for t in transfers)


_INNERMOST = {"expert", "context", "tensor2", "tensor"}


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


@lru_cache(maxsize=4096)
def _exists(schedule: str, pipe: int, microbatches: int) -> bool:
    """Whether the schedule has a table for so many stages and microbatches."""
    try:
        check_schedule(schedule, pipe, microbatches)
    except LayoutError:
        return False
    return True


def _spread(degrees: list[int]) -> list[int]:
    """Of ascending degrees every one that is at least four times the one before, and the last.

    >>> _spread([1, 2, 4, 8, 16, 32, 64, 128])
    [1, 4, 16, 64, 128]
    """
    chosen = degrees[:1]
    for degree in degrees:
        if degree >= 4 * chosen[-1]:
            chosen.append(degree)
    return list(dict.fromkeys([*chosen, degrees[-1]]))


def divisors(number: int) -> list[int]:
    """In ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
