"""The best layouts to train a model on a machine, ranked by the cost model, and why.

Candidates are all products data x fsdp x context x tensor of the chips that divide the model and
the batch, with and without sequence parallelism. Each takes the remat policy that recomputes least
of those that fit, by number of microbatches, and is priced by cost/step.py from its contractions.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.cost.graph import Graph
from meshwright.cost.memory import Memory, train_memory, update_work
from meshwright.cost.ops import record_loss
from meshwright.cost.recorder import Shape
from meshwright.cost.step import StepCost, StepPricer
from meshwright.errors import LayoutError, PlanError
from meshwright.hardware.topology import Hardware
from meshwright.layout import REMATS, Layout
from meshwright.models.config import ModelConfig
from meshwright.models.count import train_flops_per_token
from meshwright.models.transformer import dimensions
from meshwright.plan_file import Workload
from meshwright.units import format_bytes

# HBM that the runtime and the compiler keep for themselves.
RESERVED_SHARE = 0.05


@dataclass(frozen=True)
class Candidate:
    """One layout with its price."""

    layout: Layout
    cost: StepCost
    memory: Memory
    model_flops: float
    num_tokens: float
    hardware: Hardware

    @property
    def step_seconds(self) -> float:
        return self.cost.seconds

    @property
    def fits(self) -> bool:
        return self.memory.total <= usable_bytes(self.hardware)

    @property
    def mfu(self) -> float:
        """Model FLOPs over the dense peak: causal attention counted half, recomputation not at all."""
        return self.model_flops / (self.cost.seconds * self._peak_flops)

    @property
    def hfu(self) -> float:
        """Executed FLOPs, recomputation included, over the dense peak."""
        chips = self.hardware.num_chips
        return self.cost.executed_flops * chips / (self.cost.seconds * self._peak_flops)

    @property
    def _peak_flops(self) -> float:
        return self.hardware.num_chips * self.hardware.chip.flops(self.layout.compute_dtype)

    def to_dict(self) -> dict:
        """The keys of `mw plan train` in contract.md."""
        chips, seconds = self.hardware.num_chips, self.cost.seconds
        return {
            "layout": str(self.layout),
            "mesh": dict(self.layout.mesh.sizes),
            "step_seconds": seconds,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "tflops_per_chip": self.model_flops / seconds / chips / 1e12,
            "tokens_per_second_per_chip": self.num_tokens / seconds / chips,
            "bytes_per_chip": self.memory.to_dict(),
            "fits": self.fits,
            "bound": self.cost.bound,
            "breakdown": [
                {"name": t.name, "seconds": t.seconds, "share": t.seconds / seconds, "bound": t.bound}
                for t in self.cost.terms
            ],
        }


@dataclass(frozen=True)
class Search:
    """Candidates, best first; those that do not fit come last."""

    candidates: tuple[Candidate, ...]
    considered: int
    seconds: float
    assumptions: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


def usable_bytes(hardware: Hardware) -> int:
    """HBM of one chip less what the runtime keeps."""
    return round(hardware.chip.hbm_bytes * (1 - RESERVED_SHARE))


def price(config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout) -> Candidate:
    """One layout, priced. Raises LayoutError where it does not divide or has another chip count."""
    layout.check(config, seq_len=workload.seq_len)
    _check_batch(workload, layout)
    graph = _record(config, hardware, workload, layout)
    memory = train_memory(config, layout, graph)
    return _price(layout, graph, memory, hardware, workload, config)


def search(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    *,
    weights_dtype: str,
    compute_dtypes: tuple[str, ...],
    on_progress: Callable[[int], None] | None = None,
) -> Search:
    """Every layout priced and ranked by step time. Raises PlanError where none divides."""
    started = time.perf_counter()
    found: list[Candidate] = []
    considered = 0
    for mesh in _meshes(config, hardware.num_chips, workload):
        for compute_dtype in compute_dtypes:
            base = mesh.replace(weights_dtype=weights_dtype, compute_dtype=compute_dtype)
            schedules = list(_schedules(config, hardware, workload, base))
            considered += len(schedules)
            found += [
                _price(*schedule, hardware, workload, config)
                for schedule in _worth_pricing(schedules, hardware)
            ]
        if on_progress:
            on_progress(considered)
    if not found:
        raise PlanError(_nothing_divides(config, hardware, workload))
    found.sort(key=_rank)
    said = tuple(assumptions(hardware, workload, found[0]))
    return Search(tuple(found), considered, time.perf_counter() - started, said)


def _rank(candidate: Candidate) -> tuple:
    """Those that fit by time; the others by how much memory they lack."""
    over = 0 if candidate.fits else candidate.memory.total
    return (over, candidate.step_seconds)


def _meshes(config: ModelConfig, num_chips: int, workload: Workload) -> Iterator[Layout]:
    """Every division of the chips into axes that divides the model, the batch and the sequence."""
    sizes = dimensions(config)
    tensors = [d for d in _divisors(num_chips) if all(sizes[letter] % d == 0 for letter in "NKFV")]
    for tensor in tensors:
        for context in _divisors(num_chips // tensor):
            batch = num_chips // tensor // context
            if (
                workload.seq_len % context
                or batch > workload.num_sequences
                or (context > 1 and context > _MAX_CONTEXT)
            ):
                continue
            for fsdp in _divisors(batch):
                if config.d_model % fsdp:
                    continue
                layout = Layout(data=batch // fsdp, fsdp=fsdp, context=context, tensor=tensor)
                yield layout
                if tensor > 1 and workload.seq_len % (context * tensor) == 0:
                    yield layout.replace(sequence_parallel=True)


# Splitting a sequence further leaves too few queries a device for a matmul's rows.
_MAX_CONTEXT = 64


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


_Schedule = tuple[Layout, Graph, Memory]


def _schedules(
    config: ModelConfig, hardware: Hardware, workload: Workload, base: Layout
) -> Iterator[_Schedule]:
    """Remat policies by microbatches of one mesh, until nothing need be recomputed to fit."""
    per_shard = workload.num_sequences / base.num_batch_shards
    microbatches = 1
    while microbatches <= per_shard:
        layout = base.replace(microbatches=microbatches)
        graph = _record(config, hardware, workload, layout)
        for remat in REMATS:
            schedule = layout.replace(remat=remat)
            memory = train_memory(config, schedule, graph)
            yield schedule, graph, memory
            if memory.total <= usable_bytes(hardware):
                if remat == REMATS[0]:
                    return
                break
        microbatches *= 2


def _worth_pricing(schedules: list[_Schedule], hardware: Hardware) -> list[_Schedule]:
    """Those that fit; where none does, the one that comes nearest."""
    fitting = [s for s in schedules if s[2].total <= usable_bytes(hardware)]
    return fitting or [min(schedules, key=lambda schedule: schedule[2].total)]


def _record(config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout) -> Graph:
    sequences = workload.num_sequences / layout.microbatches
    shape = Shape(sequences, workload.seq_len, workload.seq_len)
    return record_loss(config, layout, shape, flash_attention=hardware.chip.kind != "cpu")


def _price(
    layout: Layout, graph: Graph, memory: Memory, hardware: Hardware, workload: Workload, config: ModelConfig
) -> Candidate:
    update = update_work(config, layout)
    return Candidate(
        layout=layout,
        cost=StepPricer(graph, layout, hardware).cost(layout.remat, update, layout.weight_axes),
        memory=memory,
        model_flops=train_flops_per_token(config, workload.seq_len) * workload.num_tokens,
        num_tokens=workload.num_tokens,
        hardware=hardware,
    )


def _check_batch(workload: Workload, layout: Layout) -> None:
    shards = layout.num_batch_shards * layout.microbatches
    if workload.num_sequences < shards:
        raise LayoutError(
            f"x[B_{{data,fsdp}}, T, D]: {workload.num_sequences} sequences (B) are fewer than "
            f"data·fsdp·microbatches = {shards}; fits: --batch-tokens {shards * workload.seq_len}"
        )


def _nothing_divides(config: ModelConfig, hardware: Hardware, workload: Workload) -> str:
    sizes = dimensions(config)
    widest = max(d for d in _divisors(hardware.num_chips) if all(sizes[x] % d == 0 for x in "NKFV"))
    context = max(
        d for d in _divisors(hardware.num_chips // widest) if workload.seq_len % d == 0 and d <= _MAX_CONTEXT
    )
    least = hardware.num_chips // widest // context
    return (
        f"{config.name} on {hardware.spec}: {workload.num_sequences} sequences of {workload.seq_len} tokens "
        f"do not divide over {hardware.num_chips} chips; with tensor at most {widest} and context at most "
        f"{context} it takes {least} sequences; fits: --batch-tokens {least * workload.seq_len}"
    )


def assumptions(hardware: Hardware, workload: Workload, best: Candidate) -> Iterator[str]:
    """What the price of `best` rests on, a sentence each."""
    chip = hardware.chip
    yield (
        "MFU counts 6 FLOPs a matmul parameter and token and half of 12 B T^2 N H a layer for causal "
        f"attention, over the dense {best.layout.compute_dtype} peak of "
        f"{chip.flops(best.layout.compute_dtype):.3g} FLOP/s a chip"
    )
    yield (
        f"large matmuls reach {chip.matmul_efficiency:.0%} of the peak; weight gathers and gradient "
        f"reductions hide under {chip.overlap:.0%} of the compute, transfers of activations do not"
    )
    yield f"{RESERVED_SHARE:.0%} of {format_bytes(chip.hbm_bytes)} HBM is left to the runtime"
    if chip.kind != "cpu":
        yield "attention runs a flash kernel that skips masked blocks; scores stay on chip"
    shards = best.layout.num_batch_shards * best.layout.microbatches
    if workload.num_sequences % shards:
        fit = round(workload.num_sequences / shards) * shards
        yield (
            f"{workload.num_sequences} sequences do not divide over {shards} batch shards and are priced as "
            f"if they did; a run takes {fit} ({fit * workload.seq_len} tokens)"
        )
