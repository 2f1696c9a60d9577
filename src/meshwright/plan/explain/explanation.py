"""The explanation of a plan: its figures. Their words are in training.txt.jinja."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from meshwright.hardware.topology import Hardware
from meshwright.layout.axes import AXES
from meshwright.layout.axes.expert import EXPERT
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan.explain.batches import (
    BatchRange,
    Budget,
    CriticalBatch,
    batch_range,
    budget,
    critical_batch,
)
from meshwright.plan.explain.fitting import Change, cheapest_fit
from meshwright.plan.explain.rejected import Rejected, bound_seconds, rejected, resource_name
from meshwright.plan.explain.thresholds import Threshold, thresholds
from meshwright.plan.train import Search, price
from meshwright.plan.words import TRAINING, Section, sections
from meshwright.plan_file import written_shardings

# Parts of a step below this share are not named.
_WORTH_NAMING = 0.01
_SHOWN = {"weights": ("w_in", "we_in", "w_out", "wq"), "activations": ("x", "h")}


@dataclass(frozen=True)
class Explanation:
    """The explanation of a search, as figures and as text. change: fits, if the best layout does not."""

    thresholds: tuple[Threshold, ...]
    rejected: tuple[Rejected, ...]
    batch_range: BatchRange
    budget: Budget | None
    critical_batch: CriticalBatch | None
    change: Change | None
    sections: tuple[Section, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.sections))

    def to_dict(self) -> dict[str, object]:
        """The keys that `mw plan train --json` adds. A figure that was not asked for is null."""
        return {
            "explanation": str(self),
            "thresholds": [asdict(limit) for limit in self.thresholds],
            "rejected": [asdict(other) for other in self.rejected],
            "batch_range": asdict(self.batch_range),
            "budget": self.budget and asdict(self.budget),
            "critical_batch": self.critical_batch and asdict(self.critical_batch),
        }


def explain(
    config: ModelConfig,
    hardware: Hardware,
    search: Search,
    *,
    num_tokens: int | None = None,
    critical_tokens: int | None = None,
) -> Explanation:
    """The explanation of a search's best layout.

    num_tokens: of the whole run, for its time and chip-hours. critical_tokens: the critical batch size.
    """
    best, workload = search.best, search.workload
    change = None if best.fits else cheapest_fit(config, hardware, workload, best)
    limits = thresholds(config, hardware, workload, best.layout)
    others = rejected(config, hardware, search)
    batches = batch_range(config, hardware, workload, best)
    run = budget(best, num_tokens) if num_tokens else None
    critical = critical_batch(workload, critical_tokens, batches) if critical_tokens else None
    step, written = best.step_seconds, written_shardings(config, best.layout)
    hidden = sum(planned.hidden_seconds for planned in best.cost.collectives)
    again = sum(term.seconds for term in best.cost.terms if "recompute" in term.name) / step
    text = sections(
        TRAINING,
        "explanation",
        best=best,
        workload=workload,
        axes=list(_axes(config, workload, best)),
        notation={
            kind: [text for name, text in written[kind].items() if name in names]
            for kind, names in _SHOWN.items()
        },
        shares=_shares(best),
        hidden=hidden if hidden / step >= _WORTH_NAMING else 0,
        others=others,
        considered=search.considered,
        limits=limits,
        batches=batches,
        critical=critical,
        bound=resource_name(batches.bound, hardware),
        again=again if again >= _WORTH_NAMING else 0,
        twice=_twice_the_batch(config, hardware, workload, best) if best.fits else None,
        narrow=_narrower_matmuls(config, hardware, workload, best) if best.fits else None,
        change=change,
        run=run,
    )
    return Explanation(limits, others, batches, run, critical, change, text)


@dataclass(frozen=True)
class AxisTraffic:
    """The collectives over one axis in a step, on one chip. hidden: the share that overlaps with compute."""

    seconds: float
    hidden: float


def traffic(candidate: Candidate, axis: str) -> AxisTraffic | None:
    """The traffic of the collectives that involve `axis`; None if there is none."""
    planned_over = [planned for planned in candidate.cost.collectives if axis in planned.axes]
    seconds = sum(planned.step_seconds for planned in planned_over)
    return (
        AxisTraffic(seconds, sum(planned.hidden_seconds for planned in planned_over) / seconds)
        if seconds
        else None
    )


def _axes(config: ModelConfig, workload: Workload, best: Candidate) -> Iterator[dict[str, object]]:
    """The axes larger than 1, with their words and their traffic."""
    layout = best.layout
    for axis in AXES:
        if (degree := layout.degree(axis.name)) > 1:
            words = axis.words(config, workload, layout.words, layout.schedule)
            moved = traffic(best, axis.name)
            is_mesh = axis is not EXPERT
            yield {"name": axis.name, "degree": degree, "words": words, "traffic": moved, "is_mesh": is_mesh}


def _shares(best: Candidate) -> list[dict[str, object]]:
    """The resources that a step waits for, the largest share first, each with its terms and their shares."""
    step, limits = best.step_seconds, []
    for bound, seconds in sorted(
        bound_seconds(best).items(), key=lambda bound_and_seconds: -bound_and_seconds[1]
    ):
        if seconds / step < _WORTH_NAMING:
            continue
        terms = [(term.name, term.seconds / step) for term in best.cost.terms if term.bound == bound]
        named = [one for one in terms if one[1] >= _WORTH_NAMING] or terms[:1]
        rest = sum(share for _, share in terms) - sum(share for _, share in named)
        if rest >= _WORTH_NAMING:
            named.append(("the rest", rest))
        name = resource_name(bound, best.hardware)
        limits.append({"bound": bound, "name": name, "share": seconds / step, "terms": named})
    return limits


def _twice_the_batch(
    config: ModelConfig, hardware: Hardware, workload: Workload, best: Candidate
) -> Candidate | None:
    """The layout at twice the batch, with the same or twice the microbatches; None if neither fits."""
    batch, layout = Workload(2 * workload.num_sequences, workload.seq_len), best.layout
    tried = [
        price(config, hardware, batch, layout.replace(microbatches=factor * layout.schedule.microbatches))
        for factor in (1, 2)
    ]
    return min((c for c in tried if c.fits), key=lambda c: c.step_seconds, default=None)


def _narrower_matmuls(
    config: ModelConfig, hardware: Hardware, workload: Workload, best: Candidate
) -> Candidate | None:
    """The same layout with fp8 matmuls, if the chip has faster units for them."""
    used, narrow = best.layout.precision.operand_dtype, "fp8"
    if hardware.chip.flops_per_second.get(narrow, 0.0) <= hardware.chip.flops(used):
        return None
    return price(config, hardware, workload, best.layout.replace(matmul_dtype=narrow))
