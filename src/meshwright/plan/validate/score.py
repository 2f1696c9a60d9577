"""The planner's prices beside what others measured, and how far apart they are.

    error = predicted / published - 1, in the row's own unit

Two scores. Free: the catalog's figures alone. Anchored: the first row of each source, chip and dtype
sets one software efficiency, a factor of every step time, as a user does who has measured one run;
those rows are then left out of the errors. Beside each stands what needs no planner: one MFU for a
chip and dtype (the rows' median), and that of the anchoring row.

    factor = (published / predicted of the first row) ^ TRUST

What one row is off by is partly its software's, which the others share, and partly its own (its model,
its layout, its luck). TRUST is the first part's share, so that the factor is what is expected of the
others.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from meshwright.errors import MeshwrightError
from meshwright.models.count import train_flops_per_token
from meshwright.plan.validate.choice import choose
from meshwright.plan.validate.inference import reproduce_inference
from meshwright.plan.validate.published import MEMORY, InferenceRow, PublishedRow, Row
from meshwright.plan.validate.reproduce import Case, reproduce

_Item = TypeVar("_Item")
# Where the constants were fitted without a row's source, 0.1 to 0.25 bring the other rows alike near, and
# nearer than more (benchmarks/fit_published.py --loso).
TRUST = 0.2


@dataclass(frozen=True)
class Prediction:
    """One row and what the planner says of it, in the row's unit. baseline: what one MFU says."""

    row: Row
    predicted: float | None = None
    skipped: str | None = None
    layout: str | None = None
    mfu: float | None = None
    baseline: float | None = None
    is_anchor: bool = False

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.row.value - 1

    @property
    def baseline_error(self) -> float | None:
        return None if self.baseline is None else self.baseline / self.row.value - 1

    def to_dict(self) -> dict:
        """The keys of a row of `mw validate` in contract.md."""
        return {
            "id": self.row.id,
            "source": self.row.source,
            "predicted": self.predicted,
            "published": self.row.value,
            "error": self.error,
            "skipped": self.skipped,
            "baseline_error": self.baseline_error,
            "layout": self.layout,
            "anchor": self.is_anchor,
        }


@dataclass(frozen=True)
class Score:
    """Errors of some rows; None where there are none. baseline_*: of one MFU."""

    num_rows: int
    median_abs_error: float | None
    p90_abs_error: float | None
    within_10_percent: float | None
    within_20_percent: float | None
    baseline_median_abs_error: float | None
    baseline_p90_abs_error: float | None

    def meets(self, median_bar: float, p90_bar: float) -> bool:
        """Whether both errors are known and at most these."""
        found = (self.median_abs_error, self.p90_abs_error)
        return all(e is not None and e <= bar for e, bar in zip(found, (median_bar, p90_bar), strict=True))


def predict(rows: Sequence[Row], on_progress: Callable[[float], None] | None = None) -> list[Prediction]:
    """Every row priced as it is (the free score)."""
    found = []
    for number, row in enumerate(rows, 1):
        found.append(_predict(row))
        if on_progress:
            on_progress(number / len(rows))
    return _with_baseline(found)


def _predict(row: Row) -> Prediction:
    try:
        if isinstance(row, InferenceRow):
            layout, figure = reproduce_inference(row).choice
            return Prediction(row, figure, layout=str(layout))
        case = reproduce(row)
        chosen = choose(case)
    except MeshwrightError as error:
        return Prediction(row, skipped=str(error))
    predicted = chosen.bytes_per_chip if row.metric == MEMORY else row.in_unit(chosen.step_seconds)
    return Prediction(row, predicted, layout=str(chosen.mix), mfu=_mfu(row, case))


def anchored(predictions: Sequence[Prediction], trust: float = TRUST) -> list[Prediction]:
    """The step times of each source, chip and dtype scaled by what the first row shows."""
    factors: dict[Hashable, tuple[float, float]] = {}
    found = []
    for given in predictions:
        row = given.row
        if not isinstance(row, PublishedRow) or row.metric == MEMORY or given.predicted is None:
            found.append(given)
            continue
        key, seconds = (row.source, row.chip, row.dtype), row.seconds(given.predicted)
        assert given.mfu is not None
        if key not in factors:
            factors[key] = (row.seconds() / seconds) ** trust, given.mfu
            found.append(replace(given, predicted=row.value, baseline=row.value, is_anchor=True))
            continue
        factor, mfu = factors[key]
        baseline = row.in_unit(row.seconds() * given.mfu / mfu)
        found.append(replace(given, predicted=row.in_unit(seconds * factor), baseline=baseline))
    return found


def _mfu(row: PublishedRow, case: Case) -> float | None:
    """Model FLOPs a second and chip that were measured, over the peak of the chip's products."""
    if row.metric == MEMORY:
        return None
    layout, chip = case.layouts[0][0], case.hardware.chip
    peak = chip.flops(layout.matmul_dtype or layout.compute_dtype)
    flops = train_flops_per_token(case.config, row.seq_len) * row.num_tokens / row.chips
    return flops / row.seconds() / peak


def _with_baseline(predictions: list[Prediction]) -> list[Prediction]:
    """What the median MFU of all rows of a chip and dtype says of each."""
    known = [p for p in predictions if isinstance(p.row, PublishedRow) and p.mfu is not None]
    medians = {
        key: median(p.mfu for p in group if p.mfu is not None)
        for key, group in grouped(known, lambda p: (p.row.chip, p.row.dtype)).items()  # pyright: ignore
    }
    return [_baseline(p, medians) for p in predictions]


def _baseline(given: Prediction, medians: dict) -> Prediction:
    row = given.row
    if not isinstance(row, PublishedRow) or given.mfu is None:
        return given
    seconds = row.seconds() * given.mfu / medians[row.chip, row.dtype]
    return replace(given, baseline=row.in_unit(seconds))


def step_rows(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Those of step times (or throughputs) that were predicted and set no anchor."""
    return [p for p in predictions if _metric(p) not in (None, MEMORY) and not p.is_anchor]


def inference_rows(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Those of serving that were predicted."""
    return [p for p in predictions if isinstance(p.row, InferenceRow) and p.predicted is not None]


def memory_rows(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Those of memory that were predicted."""
    return [p for p in predictions if _metric(p) == MEMORY]


def _metric(given: Prediction) -> str | None:
    return given.row.metric if isinstance(given.row, PublishedRow) and given.predicted is not None else None


def score(predictions: Sequence[Prediction]) -> Score:
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


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which `share` of the ordered values lie, interpolated; None of no values.

    >>> quantile([1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0], 0.9)
    (2.0, 1.9)
    """
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _share_within(errors: Sequence[float], bound: float) -> float | None:
    return sum(e <= bound for e in errors) / len(errors) if errors else None


@dataclass(frozen=True)
class Regret:
    """Rows of one model, machine and batch under several layouts.

    regret: the best measured step time was this share below that of the layout ranked first.
    """

    ids: tuple[str, ...]
    best_id: str
    chosen_id: str
    regret: float


def regrets(predictions: Iterable[Prediction]) -> list[Regret]:
    """One for each group of rows of one table that differ in their layout alone."""
    groups = grouped(step_rows(predictions), _question)
    return [_regret(group) for group in groups.values() if len({p.layout for p in group}) > 1]


def _question(given: Prediction) -> Hashable:
    """What a planner is asked, of which a layout is the answer."""
    row = given.row
    assert isinstance(row, PublishedRow)
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
    return (row.source, model, row.hardware, figures, row.dtype, row.seq_len, row.num_tokens)


def _regret(group: Sequence[Prediction]) -> Regret:
    def measured(p: Prediction) -> float:
        assert isinstance(p.row, PublishedRow)
        return p.row.seconds()

    def predicted(p: Prediction) -> float:
        assert isinstance(p.row, PublishedRow) and p.predicted is not None
        return p.row.seconds(p.predicted)

    best = min(group, key=measured)
    ranked_first = min(group, key=predicted).layout
    chosen = min((p for p in group if p.layout == ranked_first), key=measured)
    lost = measured(chosen) / measured(best) - 1
    return Regret(tuple(p.row.id for p in group), best.row.id, chosen.row.id, lost)


def grouped(items: Iterable[_Item], key: Callable[[_Item], Hashable]) -> dict[Hashable, list[_Item]]:
    """The items by key, in order of first appearance."""
    found: dict[Hashable, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found
