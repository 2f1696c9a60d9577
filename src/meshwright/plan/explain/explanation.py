"""A plan in words that a newcomer to sharding can follow: what, where the time goes, why, and what next."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan.explain.advice import to_fit, to_go_faster
from meshwright.plan.explain.alternatives import rejected
from meshwright.plan.explain.batches import (
    BatchRange,
    Budget,
    CriticalBatch,
    batch_range,
    budget,
    critical_batch,
)
from meshwright.plan.explain.comparison import Rejected, bound_seconds, percent, resource_name
from meshwright.plan.explain.fitting import Change, cheapest_fit
from meshwright.plan.explain.layout_words import describe, memory_words
from meshwright.plan.explain.thresholds import Threshold, rounded, thresholds
from meshwright.plan.train import Search
from meshwright.units import format_count, format_seconds

# A term below this share of the step is not named.
_WORTH_NAMING = 0.01


@dataclass(frozen=True)
class Section:
    """A heading and its points."""

    title: str
    paragraphs: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((self.title, *(f"- {paragraph}" for paragraph in self.paragraphs)))


@dataclass(frozen=True)
class Explanation:
    """What is to be said of a search, as figures and as prose. change: with which it fits, if it does not."""

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
        """The keys that `mw plan train --json` adds; what was not asked for is null."""
        return {
            "explanation": str(self),
            "thresholds": [threshold.to_dict() for threshold in self.thresholds],
            "rejected": [one.to_dict() for one in self.rejected],
            "batch_range": self.batch_range.to_dict(),
            "budget": self.budget.to_dict() if self.budget else None,
            "critical_batch": self.critical_batch.to_dict() if self.critical_batch else None,
        }


def explain(
    config: ModelConfig,
    hardware: Hardware,
    found: Search,
    *,
    num_tokens: int | None = None,
    critical_tokens: int | None = None,
) -> Explanation:
    """The explanation of a search's best layout.

    num_tokens: of the whole run, for its time and chip-hours. critical_tokens: the critical batch size.
    """
    best, workload = found.best, found.workload
    change = None if best.fits else cheapest_fit(config, hardware, workload, best)
    limits = thresholds(config, hardware, workload, best.layout)
    others = rejected(config, hardware, found)
    batches = batch_range(config, hardware, workload, best)
    run = budget(best, num_tokens) if num_tokens else None
    critical = critical_batch(workload, critical_tokens, batches) if critical_tokens else None
    sections = [
        Section("The layout", tuple(describe(config, workload, best))),
        Section("Where the time goes", tuple(_time(best))),
        Section("Memory", (memory_words(best, hardware.chip.program_bytes),)),
        Section("Why not another" if found.considered > 1 else "Other layouts", tuple(_others(others, best))),
        Section("Rules of thumb", tuple(_rules(limits))),
        Section("Batch", tuple(_batches(workload, best, batches, critical))),
        Section("To go faster", tuple(to_go_faster(config, hardware, workload, best)))
        if best.fits
        else Section("To make it fit", tuple(to_fit(best, change))),
    ]
    if run:
        sections.append(Section("Budget", tuple(_budget(run, best))))
    sections = [section for section in sections if section.paragraphs]
    return Explanation(limits, others, batches, run, critical, change, tuple(sections))


def _time(best: Candidate) -> Iterator[str]:
    seconds, hardware = best.step_seconds, best.hardware
    peak = hardware.chip.flops(best.layout.matmul_dtype or best.layout.compute_dtype)
    yield (
        f"A step takes {format_seconds(seconds)}: {format_count(best.num_tokens / seconds)} tokens per "
        f"second. MFU, the model's useful FLOPs over the chips' dense peak of {_flops(peak)}, is "
        f"{best.mfu:.1%}."
    )
    shares = bound_seconds(best)
    for bound in sorted(shares, key=shares.__getitem__, reverse=True):
        if shares[bound] / seconds >= _WORTH_NAMING:
            name = resource_name(bound, hardware)
            yield f"{percent(shares[bound] / seconds)} {name}: {_terms(best, bound)}."
    hidden = sum(one.hidden_seconds for one in best.cost.collectives)
    if hidden / seconds >= _WORTH_NAMING:
        yield f"Another {format_seconds(hidden)} of transfers are hidden behind compute."


def _flops(flops_per_second: float) -> str:
    tera = flops_per_second / 1e12
    return f"{tera:.4g} TFLOP/s" if tera >= 1 else f"{1000 * tera:.3g} GFLOP/s"


def _terms(candidate: Candidate, bound: str) -> str:
    """The terms that wait for one resource with their shares of the step, largest first."""
    seconds = candidate.step_seconds
    terms = [t for t in candidate.cost.terms if t.bound == bound]
    named = [t for t in terms if t.seconds / seconds >= _WORTH_NAMING] or terms[:1]
    listed = [f"{t.name} {percent(t.seconds / seconds)}" for t in named]
    rest = sum(t.seconds for t in terms) - sum(t.seconds for t in named)
    if rest / seconds >= _WORTH_NAMING:
        listed.append(f"the rest {percent(rest / seconds)}")
    return ", ".join(listed)


def _others(others: tuple[Rejected, ...], best: Candidate) -> Iterator[str]:
    for one in others:
        name = one.name[0].upper() + one.name[1:]
        yield f"{name}, {one.layout}, {one.text}."
    if not best.fits and all(one.reason != "fits" for one in others):
        yield "None of these layouts fits either."


def _rules(limits: tuple[Threshold, ...]) -> Iterator[str]:
    yield (
        "Closed forms of the textbook with this case's figures. They assume ideal links, count only the MLP "
        "and hide every transfer. The search does not use them: it prices the whole step. Symbols: P "
        "parameters; B tokens per step; N chips; X shards of the batch, Y of the model; M_X, M_Y mesh "
        "dimensions that each uses, n all of them; F feed-forward width; alpha a chip's FLOP/s over the "
        "bytes/s of one dimension's links."
    )
    for limit in limits:
        verdict = {True: "yes", False: "no", None: f"optimum {rounded(limit.limit)}"}[limit.holds]
        yield f"{limit.meaning} ({limit.formula}: {verdict})."


def _batches(
    workload: Workload, best: Candidate, batches: BatchRange, critical: CriticalBatch | None
) -> Iterator[str]:
    shards, hardware = best.layout.num_batch_shards, best.hardware
    if batches.min_tokens is None or batches.tokens_per_chip is None:
        yield (
            "This layout is not compute-bound at any batch size that was tried: "
            f"{resource_name(batches.bound, hardware)} stays the largest share of the step."
        )
    else:
        text = (
            f"This layout is compute-bound from {format_count(batches.min_tokens)} tokens per step, "
            f"{rounded(batches.tokens_per_chip)} per chip"
        )
        if batches.min_tokens == shards * workload.seq_len:
            text += " (one sequence for each shard of the batch, the least that divides)"
        if batches.max_tokens:
            text += (
                f"; {format_count(batches.max_tokens)} fit in memory with this number of microbatches, more "
                "with "
                "more microbatches"
            )
        yield f"{text}. This step has {format_count(workload.num_tokens)}."
    if critical:
        yield _critical(critical)


def _critical(critical: CriticalBatch) -> str:
    side = "beyond" if critical.crossed else "within"
    text = (
        f"The batch is {critical.times:.2g} times the critical batch size of {format_count(critical.tokens)} "
        f"tokens ({side} it). Reaching the same loss takes about {critical.more_tokens:.2g} times as many "
        "tokens as with very small batches"
    )
    if critical.max_chips:
        text += (
            f". At the fewest tokens per chip that keep this layout compute-bound, {critical.max_chips:,} "
            "chips "
            "use a whole critical batch"
        )
    return f"{text}."


def _budget(run: Budget, best: Candidate) -> Iterator[str]:
    price = f", {format_count(run.price)} {run.currency} at the list price" if run.price is not None else ""
    time = f"{run.days:,.0f} days" if run.days >= 1000 else format_seconds(run.seconds)
    yield (
        f"{format_count(run.tokens)} tokens are {run.steps:,} steps and {run.flops:.3g} FLOPs: {time} on "
        f"{best.hardware.num_chips:,} chips, {format_count(run.chip_hours)} chip-hours{price}. Restarts, "
        "evaluation and checkpoints are not counted."
    )
