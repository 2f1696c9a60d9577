"""The batches for which a layout stays bound by compute, and what a training run of so many tokens takes."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil

from meshwright.errors import LayoutError
from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan.train import price

# How far beyond the asked batch a layout is tried.
_MOST_DOUBLINGS = 12


@dataclass(frozen=True)
class BatchRange:
    """Tokens of one step between which a layout computes longer than it waits for any one resource.

    min_tokens: None where no batch tried is bound by compute. max_tokens: the most that fits with the
    schedule's microbatches; more fit with more microbatches. bound: of the asked batch. tokens_per_chip:
    of min_tokens.
    """

    min_tokens: int | None
    max_tokens: int | None
    tokens_per_chip: float | None
    bound: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def batch_range(config: ModelConfig, hardware: Hardware, workload: Workload, chosen: Candidate) -> BatchRange:
    """The range of `chosen`'s mesh and remat policy, by bisection.

    Smaller batches take microbatches of the same size, or as few as the schedule takes; larger ones as many.
    """
    layout, seq_len = chosen.layout, workload.seq_len
    # Whole rounds of the stages, which is what interleaved schedules ask for.
    fewest = layout.pipe
    size = workload.num_sequences // (layout.num_batch_shards * layout.microbatches)

    def priced(microbatches: int, of_size: int) -> Candidate:
        batch = Workload(layout.num_batch_shards * microbatches * of_size, seq_len)
        return price(config, hardware, batch, layout.replace(microbatches=microbatches))

    def is_compute_bound(microbatches: int, of_size: int) -> bool:
        with suppress(LayoutError):  # a schedule that needs more microbatches
            found = priced(microbatches, of_size)
            return found.cost.bound == "compute" and (found.fits or not chosen.fits)
        return False

    rounds = _first(lambda n: is_compute_bound(n * fewest, size), max(1, layout.microbatches // fewest))
    sizes = _first(lambda n: is_compute_bound(fewest, n), size)
    passes = [number for number in ((rounds or 0) * fewest * size, fewest * (sizes or 0)) if number]
    tokens = min(passes) * layout.num_batch_shards * seq_len if passes else None
    most = _last(lambda n: priced(layout.microbatches, n).fits, size) if chosen.fits else None
    return BatchRange(
        min_tokens=tokens,
        max_tokens=None
        if most is None
        else max(most * layout.microbatches * layout.num_batch_shards * seq_len, workload.num_tokens),
        tokens_per_chip=tokens / hardware.num_chips if tokens else None,
        bound=chosen.cost.bound,
    )


def _first(holds: Callable[[int], bool], start: int) -> int | None:
    """The least positive number from which `holds` is true, if it is once true for ever; None if never."""
    above = start
    for _ in range(_MOST_DOUBLINGS):
        if holds(above):
            return _bisect(lambda number: not holds(number), 0, above)
        above *= 2
    return None


def _last(holds: Callable[[int], bool], start: int) -> int | None:
    """The largest number until which `holds` is true, 0 if not at `start`; None if it is wherever tried."""
    if not holds(start):
        return 0
    above = start
    for _ in range(_MOST_DOUBLINGS):
        above *= 2
        if not holds(above):
            return _bisect(holds, above // 2, above) - 1
    return None


def _bisect(holds: Callable[[int], bool], below: int, above: int) -> int:
    """The least number in (below, above] for which `holds` is false, as it is for `above`."""
    while above - below > 1:
        middle = (below + above) // 2
        if holds(middle):
            below = middle
        else:
            above = middle
    return above


@dataclass(frozen=True)
class Budget:
    """A whole run of so many tokens. price: in `currency`, None where no price is known."""

    tokens: int
    steps: int
    seconds: float
    days: float
    chip_hours: float
    flops: float
    price: float | None
    currency: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def budget(candidate: Candidate, num_tokens: int) -> Budget:
    """What `num_tokens` take at this step time, without restarts, evaluation or checkpoints."""
    steps = ceil(num_tokens / candidate.num_tokens)
    seconds = steps * candidate.step_seconds
    hours = seconds * candidate.hardware.num_chips / 3600
    hourly = candidate.hardware.chip.price_per_chip_hour
    return Budget(
        tokens=num_tokens,
        steps=steps,
        seconds=seconds,
        days=seconds / 86_400,
        chip_hours=hours,
        flops=steps * candidate.model_flops,
        price=None if hourly is None else hourly * hours,
        currency=candidate.hardware.chip.currency,
    )


@dataclass(frozen=True)
class CriticalBatch:
    """The asked batch against the critical batch size, beyond which more tokens per step buy few steps.

    times: the asked batch over it. more_tokens: how many times the tokens of a small batch the same loss
    takes, 1 + B / B_crit (McCandlish et al., 2018, "An Empirical Model of Large-Batch Training").
    max_chips: where the least batch that is bound by compute reaches it, at the same tokens per chip; None
    where that batch is not known.
    """

    tokens: int
    times: float
    crossed: bool
    more_tokens: float
    max_chips: int | None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def critical_batch(workload: Workload, critical_tokens: int, found: BatchRange) -> CriticalBatch:
    """How `critical_tokens` compare with this workload and with the batches that its machine needs."""
    times, per_chip = workload.num_tokens / critical_tokens, found.tokens_per_chip
    return CriticalBatch(
        tokens=critical_tokens,
        times=times,
        crossed=times > 1,
        more_tokens=1 + times,
        max_chips=int(critical_tokens / per_chip) if per_chip else None,
    )
