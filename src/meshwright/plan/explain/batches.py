"""Batch sizes that make a layout compute-bound, and the time and price of a training run."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil

from meshwright.errors import LayoutError
from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.bisection import first_false
from meshwright.plan.candidate import Candidate
from meshwright.plan.train import price

# Batches up to the given one times 2 to this power are tried.
_MOST_DOUBLINGS = 12


@dataclass(frozen=True)
class BatchRange:
    """Tokens per step between which compute is the largest share of the step.

    min_tokens: None if no batch that was tried is compute-bound. max_tokens: the most that fits with the
    planned number of microbatches. bound: of the planned batch. tokens_per_chip: of min_tokens.
    """

    min_tokens: int | None
    max_tokens: int | None
    tokens_per_chip: float | None
    bound: str


def batch_range(config: ModelConfig, hardware: Hardware, workload: Workload, chosen: Candidate) -> BatchRange:
    """The range of the chosen mesh and remat policy, by bisection.

    Smaller batches take microbatches of the same size, or the fewest microbatches of the schedule; larger
    batches the planned number of microbatches.
    """
    layout = chosen.layout
    sequences = workload.seq_len * layout.num_batch_shards  # tokens of one sequence per shard
    # A multiple of the stages, as interleaved schedules require.
    fewest = layout.pipe
    size = workload.num_sequences // (layout.num_batch_shards * layout.schedule.microbatches)

    def priced(microbatches: int, of_size: int) -> Candidate:
        batch = replace(workload, num_sequences=layout.num_batch_shards * microbatches * of_size)
        return price(config, hardware, batch, layout.replace(microbatches=microbatches))

    def is_compute_bound(microbatches: int, of_size: int) -> bool:
        with suppress(LayoutError):  # a schedule that needs more microbatches
            candidates = priced(microbatches, of_size)
            return candidates.cost.bound == "compute" and (candidates.fits or not chosen.fits)
        return False

    groups = _first(
        lambda n: is_compute_bound(n * fewest, size), max(1, layout.schedule.microbatches // fewest)
    )
    sizes = _first(lambda n: is_compute_bound(fewest, n), size)
    least = min(filter(None, ((groups or 0) * fewest * size, fewest * (sizes or 0))), default=None)
    tokens = least * sequences if least else None
    most = _last(lambda n: priced(layout.schedule.microbatches, n).fits, size) if chosen.fits else None
    return BatchRange(
        min_tokens=tokens,
        max_tokens=None
        if most is None
        else max(most * layout.schedule.microbatches * sequences, workload.num_tokens),
        tokens_per_chip=tokens / hardware.num_chips if tokens else None,
        bound=chosen.cost.bound,
    )


def _first(holds: Callable[[int], bool], start: int) -> int | None:
    """The least positive number that makes `holds` true; None if none does."""
    for above in (start * 2**n for n in range(_MOST_DOUBLINGS)):
        if holds(above):
            return first_false(lambda number: not holds(number), 0, above)
    return None


def _last(holds: Callable[[int], bool], start: int) -> int | None:
    """The largest number that keeps `holds` true, 0 if not at `start`; None if all do."""
    if not holds(start):
        return 0
    for above in (start * 2**n for n in range(1, _MOST_DOUBLINGS + 1)):
        if not holds(above):
            return first_false(holds, above // 2, above) - 1
    return None


@dataclass(frozen=True)
class Budget:
    """A whole training run. price: in `currency`, None if the chip has no price."""

    tokens: int
    steps: int
    seconds: float
    days: float
    chip_hours: float
    flops: float
    price: float | None
    currency: str


def budget(candidate: Candidate, num_tokens: int) -> Budget:
    """The budget of `num_tokens` at this step time, without restarts, evaluation or checkpoints."""
    steps, chip = ceil(num_tokens / candidate.num_tokens), candidate.hardware.chip
    seconds = steps * candidate.step_seconds
    hours = seconds * candidate.hardware.num_chips / 3600
    return Budget(
        tokens=num_tokens,
        steps=steps,
        seconds=seconds,
        days=seconds / 86_400,
        chip_hours=hours,
        flops=steps * candidate.model_flops,
        price=None if chip.price_per_chip_hour is None else chip.price_per_chip_hour * hours,
        currency=chip.currency,
    )


@dataclass(frozen=True)
class CriticalBatch:
    """The batch compared with the critical batch size, beyond which larger batches save few steps.

    times: the batch over the critical size. more_tokens: tokens to the same loss, relative to a small
    batch, 1 + B / B_crit (McCandlish et al., 2018, "An Empirical Model of Large-Batch Training").
    max_chips: chips that use a critical batch at the fewest tokens per chip that are compute-bound; None if
    that is unknown.
    """

    tokens: int
    times: float
    crossed: bool
    more_tokens: float
    max_chips: int | None


def critical_batch(workload: Workload, critical_tokens: int, batches: BatchRange) -> CriticalBatch:
    """The critical batch size against this workload and the batches that its machine needs."""
    times, per_chip = workload.num_tokens / critical_tokens, batches.tokens_per_chip
    chips = int(critical_tokens / per_chip) if per_chip else None
    return CriticalBatch(critical_tokens, times, times > 1, 1 + times, chips)
