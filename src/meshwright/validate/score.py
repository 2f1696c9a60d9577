"""Errors of the planner's predictions against published measurements.

    error = predicted / published - 1, in the row's unit

There are two scores. The free score uses only the catalog's figures. In the anchored score the first two rows
of each source and chip correct the others, as for a user who has measured two runs (alike.py); these rows are
not scored. Each score is compared with a baseline without a planner: the median MFU of other sources' rows
with the chip and dtype, or the MFU of the first anchor.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import exp, inf, log, sqrt
from statistics import mean, median
from typing import TypeVar, cast

from meshwright.errors import MeshwrightError
from meshwright.models.count import train_flops_per_token
from meshwright.plan.assumptions import spread_on
from meshwright.plan.spread import quantile
from meshwright.validate.alike import TRUST, Traits, expected_error
from meshwright.validate.choice import fastest_mix
from meshwright.validate.parallel_rows import results_of
from meshwright.validate.published import MEMORY, AnyRow, InferenceRow, PublishedRow, UnreadRow
from meshwright.validate.reproduce import Case, reproduce
from meshwright.validate.static_batches import reproduce_inference

_Item = TypeVar("_Item")
# Rows of a source and chip that correct its other rows.
ANCHORS = 2
# The share of a first row's log error that other rows of serving have: 0.1 to 0.25 give about equal errors.
SERVED_TRUST = 0.2
# Several processes are faster than one from this number of rows on. Each takes parts of a table: neighbouring
# rows often have the same model, whose priced layouts a process keeps.
_LEAST_FOR_PROCESSES, _ROWS_OF_A_PART = 300, 20


@dataclass(frozen=True)
class Prediction:
    """A row and its prediction, in the row's unit.

    baseline: the prediction by one MFU. fits: whether the planner predicts that the layout fits the memory.
    range: of the figure, for 8 of 10 new sources, by other sources than the row's. memory_figure: for a row
    of memory, which figure is predicted: allocated, reserved or device (`TrainingProgram.memory_figure`).
    """

    row: AnyRow
    predicted: float | None = None
    skipped: str | None = None
    layout: str | None = None
    mfu: float | None = None
    baseline: float | None = None
    is_anchor: bool = False
    fits: bool | None = None
    range: tuple[float, float] | None = None
    memory_figure: str | None = None

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.row.value - 1

    @property
    def baseline_error(self) -> float | None:
        return None if self.baseline is None else self.baseline / self.row.value - 1

    def to_dict(self) -> dict:
        """The keys of a row of `mw validate` in docs/reference/json.md."""
        return {
            "id": self.row.id,
            "source": self.row.source,
            "predicted": self.predicted,
            "published": self.row.value,
            "error": self.error,
            "skipped": self.skipped,
            "baseline_error": self.baseline_error,
            "layout": self.layout,
            "fits": self.fits,
            "range": None if self.range is None else list(self.range),
            "memory_figure": self.memory_figure,
            "anchor": self.is_anchor,
        }


@dataclass(frozen=True)
class Score:
    """Errors of some rows; None without rows. baseline_*: errors of the predictions by one MFU."""

    num_rows: int
    median_abs_error: float | None
    p90_abs_error: float | None
    within_10_percent: float | None
    within_20_percent: float | None
    baseline_median_abs_error: float | None
    baseline_p90_abs_error: float | None

    def meets(self, median_bar: float, p90_bar: float) -> bool:
        """Whether both errors are known and at most these."""
        errors = (self.median_abs_error, self.p90_abs_error)
        return all(e is not None and e <= bar for e, bar in zip(errors, (median_bar, p90_bar), strict=True))


def predict(
    rows: Sequence[AnyRow | UnreadRow],
    on_progress: Callable[[float], None] | None = None,
    *,
    in_processes: bool = False,
) -> list[Prediction]:
    """Predictions of all rows for the free score.

    in_processes: share out a large table over processes. They import the calling script again, so it may only
    ask for them under `if __name__ == "__main__":`.
    """
    parts = [rows[first : first + _ROWS_OF_A_PART] for first in range(0, len(rows), _ROWS_OF_A_PART)]
    predictions: list[Prediction] = []
    for made in results_of(_predict, parts, in_processes=in_processes, least_rows=_LEAST_FOR_PROCESSES):
        predictions += made
        if on_progress:
            on_progress(len(predictions) / len(rows))
    known = [(p.row, p.mfu) for p in predictions if isinstance(p.row, PublishedRow) and p.mfu is not None]
    return [_baseline(prediction, known) for prediction in predictions]


def _predict(row: AnyRow | UnreadRow) -> Prediction:
    if isinstance(row, UnreadRow):
        return Prediction(cast(AnyRow, row), skipped=row.reason)  # of a skipped row only the name is used
    try:
        if isinstance(row, InferenceRow):
            layout, figure = reproduce_inference(row).choice
            return Prediction(row, figure, layout=str(layout))
        case = reproduce(row)
        chosen = fastest_mix(case)
    except MeshwrightError as error:
        return Prediction(row, skipped=row.why_skipped(error))
    except (
        ArithmeticError,
        AssertionError,
        LookupError,
        ValueError,
    ) as error:  # a table never stops at a row
        return Prediction(row, skipped=row.why_skipped(f"cannot be priced: {type(error).__name__}: {error}"))
    is_memory = row.metric == MEMORY
    predicted = chosen.reported_bytes if is_memory else row.in_unit(chosen.step_seconds)
    fits = chosen.bytes_per_chip <= case.hardware.chip.program_bytes
    known = spread_on(
        chosen.mix.hardware,
        has_experts=case.config.moe is not None,
        figure="memory" if is_memory else "time",
        without=row.source,
    )
    low_high = None if known is None else known.interval(predicted)
    return Prediction(
        row,
        predicted,
        layout=str(chosen.mix),
        mfu=_mfu(row, case),
        fits=fits,
        range=low_high,
        memory_figure=chosen.mix.hardware.software.memory_figure if is_memory else None,
    )


def anchored_by_source(predictions: Sequence[Prediction], trust: float = TRUST) -> list[Prediction]:
    """Predictions of times, corrected by the first rows with the same source and chip.

    Up to ANCHORS training rows correct the others, each as far as it is like them (`expected_error`). A row
    of serving is scaled by the first with the same metric and weights, by SERVED_TRUST of its log error.
    """
    anchors: dict[Hashable, list[tuple[Prediction, float]]] = {}
    anchored = []
    for free in predictions:
        row = free.row
        if row.metric == MEMORY or free.predicted is None:
            anchored.append(free)
            continue
        seconds = row.seconds(free.predicted)
        kept = anchors.setdefault(_anchored_together(row), [])
        if len(kept) < (1 if isinstance(row, InferenceRow) else ANCHORS):
            kept.append((free, log(seconds / row.seconds())))
            of_row = None if free.mfu is None else row.value
            anchored.append(replace(free, predicted=row.value, baseline=of_row, is_anchor=True))
            continue
        mfu = kept[0][0].mfu
        baseline = row.in_unit(row.seconds() * free.mfu / mfu) if free.mfu and mfu else None
        seconds *= exp(-_carried(row, kept, trust))
        anchored.append(replace(free, predicted=row.in_unit(seconds), baseline=baseline))
    return anchored


def _carried(row: AnyRow, kept: Sequence[tuple[Prediction, float]], trust: float) -> float:
    """The expected log error of a row, given the errors of its anchors."""
    if isinstance(row, InferenceRow):
        return SERVED_TRUST * kept[0][1]
    anchors = [(Traits.of(one.row), error) for one, error in kept if isinstance(one.row, PublishedRow)]
    return expected_error(anchors, Traits.of(row), trust)


def _anchored_together(row: AnyRow) -> Hashable:
    if isinstance(row, InferenceRow):
        return row.source, row.chip, row.weight_dtype, row.metric
    return row.source, row.chip


def _mfu(row: PublishedRow, case: Case) -> float | None:
    """Measured model FLOPs per second and chip, over the peak of the chip's products."""
    if row.metric == MEMORY:
        return None
    layout, chip = case.layouts[0][0], case.hardware.chip
    peak = chip.flops(layout.precision.operand_dtype)
    flops = train_flops_per_token(case.config, row.seq_len) * row.num_tokens / row.chips
    return flops / row.seconds() / peak


def _baseline(given: Prediction, known: Sequence[tuple[PublishedRow, float]]) -> Prediction:
    """The prediction with its baseline.

    The median MFU is over other sources' rows with the same chip and dtype. If there are none it is that
    of rows with the same chip, otherwise of all.
    """
    row = given.row
    if not isinstance(row, PublishedRow) or given.mfu is None:
        return given
    others = [(other, mfu) for other, mfu in known if other.source != row.source]
    same_chip = [(other, mfu) for other, mfu in others if other.chip == row.chip]
    same = [(other, mfu) for other, mfu in same_chip if other.dtype == row.dtype]
    taken = next((some for some in (same, same_chip, others) if some), None)
    if taken is None:
        return given
    seconds = row.seconds() * given.mfu / median(mfu for _, mfu in taken)
    return replace(given, baseline=row.in_unit(seconds))


def step_rows(predictions: Iterable[Prediction]) -> list[Prediction]:
    """The predictions of step times or throughputs that set no anchor."""
    return [p for p in predictions if _metric(p) not in (None, MEMORY) and not p.is_anchor]


def inference_rows(predictions: Iterable[Prediction]) -> list[Prediction]:
    """The predictions of serving rows that set no anchor."""
    return [
        p
        for p in predictions
        if isinstance(p.row, InferenceRow) and p.predicted is not None and not p.is_anchor
    ]


def memory_predictions(predictions: Iterable[Prediction]) -> list[Prediction]:
    """The predictions of memory of programs that ran."""
    return [p for p in predictions if _metric(p) == MEMORY and not _ran_out(p)]


def _ran_out(given: Prediction) -> bool:
    return isinstance(given.row, PublishedRow) and given.row.ran_out


@dataclass(frozen=True)
class Verdicts:
    """Shares of wrong predictions of whether a layout fits.

    num_ran, false_does_not_fit: layouts that ran, and the share predicted not to fit. num_ran_out,
    false_fits: layouts that ran out of memory, if the same layout ran with a smaller microbatch, and the
    share predicted to fit.
    """

    num_ran: int
    false_does_not_fit: float | None
    num_ran_out: int
    false_fits: float | None


def memory_verdicts(predictions: Iterable[Prediction]) -> Verdicts:
    """The verdicts on all predicted rows, with each layout counted once."""
    known = {_memory_question(p): p for p in predictions if p.fits is not None and _metric(p)}
    ran = [key for key, p in known.items() if not _ran_out(p)]
    least: dict[Hashable, float] = {}
    for question, size in ran:
        least[question] = min(size, least.get(question, size))
    out = [key for key, p in known.items() if _ran_out(p) and least.get(key[0], inf) < key[1]]
    wrong = sum(not known[key].fits for key in ran), sum(bool(known[key].fits) for key in out)
    shares = [number / len(keys) if keys else None for number, keys in zip(wrong, (ran, out), strict=True)]
    return Verdicts(len(ran), shares[0], len(out), shares[1])


def _memory_question(given: Prediction) -> tuple[Hashable, float]:
    """(the other columns that a row's memory depends on, its microbatch)."""
    row = given.row
    assert isinstance(row, PublishedRow)
    degrees = (row.data, row.fsdp, row.tensor, row.pipe, row.interleave, row.context, row.expert)
    return (panel_of(row), degrees, row.zero, row.zero_group, row.remat), row.micro_batch or 0.0


def _metric(given: Prediction) -> str | None:
    return given.row.metric if isinstance(given.row, PublishedRow) and given.predicted is not None else None


def score_predictions(predictions: Sequence[Prediction]) -> Score:
    """Median and 90th percentile of the absolute errors, and the shares within 10 and 20%."""
    errors = sorted(abs(p.error) for p in predictions if p.error is not None)
    baseline = sorted(abs(p.baseline_error) for p in predictions if p.baseline_error is not None)
    return Score(
        len(errors),
        quantile(errors, 0.5),
        quantile(errors, 0.9),
        _share_within(errors, 0.1),
        _share_within(errors, 0.2),
        quantile(baseline, 0.5),
        quantile(baseline, 0.9),
    )


def _share_within(errors: Sequence[float], bound: float) -> float | None:
    return sum(e <= bound for e in errors) / len(errors) if errors else None


@dataclass(frozen=True)
class Ranking:
    """The ranking of a panel: rows of one model, machine and batch under several layouts.

    A panel of serving also has several batches; times are then chip-seconds per token. regret: measured time
    of the choice that is predicted fastest, over the shortest, minus 1. best_of_five: the same for the best
    of the first five choices. tau: Kendall's rank correlation of predicted and measured times. rule_regret:
    regret of the layout with the smallest tensor, then the smallest pipe, then the largest microbatch, or for
    serving batch. random_regret: mean regret of a random choice.
    """

    ids: tuple[str, ...]
    best_id: str
    chosen_id: str
    regret: float
    best_of_five: float
    tau: float
    rule_regret: float
    random_regret: float


def rankings(predictions: Iterable[Prediction]) -> list[Ranking]:
    """A ranking for each panel with several measured choices."""
    predictions = list(predictions)
    timed = [p for p in (*step_rows(predictions), *inference_rows(predictions)) if p.predicted]
    panels = grouped(timed, lambda p: panel_of(p.row))
    return [_ranking(panel) for panel in panels.values() if len({_choice(p) for p in panel}) > 1]


def _choice(given: Prediction) -> Hashable:
    """The choice of a row in its panel: its layout, and for serving its chips and batch."""
    row = given.row
    return (given.layout, row.chips, row.batch) if isinstance(row, InferenceRow) else given.layout


def _cost(row: AnyRow, figure: float | None = None) -> float:
    return row.chip_seconds_per_token(figure) if isinstance(row, InferenceRow) else row.seconds(figure)


def _ranking(panel: Sequence[Prediction]) -> Ranking:
    measured = {id(p): _cost(p.row) for p in panel}
    priced = {id(p): _cost(p.row, p.predicted) for p in panel}
    order = sorted(panel, key=lambda p: priced[id(p)])
    best = min(measured.values())

    def lost(chosen: Prediction) -> float:
        """The regret of a choice: its fastest run over the fastest run of the panel, minus 1."""
        return min(measured[id(p)] for p in panel if _choice(p) == _choice(chosen)) / best - 1

    def plain(given: Prediction) -> tuple[float, ...]:
        row = given.row
        most = row.batch if isinstance(row, InferenceRow) else row.micro_batch or 0
        return row.tensor or 1, row.pipe or 1, -most

    return Ranking(
        ids=tuple(p.row.id for p in panel),
        best_id=min(panel, key=lambda p: measured[id(p)]).row.id,
        chosen_id=order[0].row.id,
        regret=lost(order[0]),
        best_of_five=min(map(lost, order[:5])),
        tau=kendall_tau([(priced[id(p)], measured[id(p)]) for p in panel]),
        rule_regret=lost(min(panel, key=plain)),
        random_regret=mean(measured.values()) / best - 1,
    )


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b: concordant minus discordant pairs, over untied pairs.

    >>> kendall_tau([(1, 1), (2, 2), (3, 4), (4, 3)])
    0.6666666666666666
    """
    agree, first, second = 0, 0, 0
    for (a, b), (c, d) in combinations(pairs, 2):
        x, y = (a > c) - (a < c), (b > d) - (b < d)
        agree, first, second = agree + x * y, first + abs(x), second + abs(y)
    return agree / sqrt(first * second) if first and second else 0.0


def panel_of(row: AnyRow) -> Hashable:
    """The model, machine and batch of a row: rows of a panel differ only in their layout.

    For serving, the model, chip, engine, types and lengths: rows differ in layout, chips and batch.
    """
    model = (
        row.mlp,
        row.n_layers,
        row.d_model,
        row.d_ff,
        row.n_heads,
        row.n_kv_heads,
        row.vocab,
        row.experts,
    )
    figures = (row.nic_gbit_per_gpu, row.hbm_bytes_per_second, row.power_watts)
    if isinstance(row, InferenceRow):
        asked = (row.weight_dtype, row.kv_dtype, row.prompt_len, row.output_len, row.metric)
        return (row.source, model, row.chip, figures, row.engine, asked)
    return (row.source, model, row.hardware, figures, row.dtype, row.seq_len, row.num_tokens)


def grouped(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> dict[Hashable, list[_Item]]:
    """The items by key, in order of first appearance."""
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
