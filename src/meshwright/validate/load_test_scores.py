"""Scores of predicted load tests: errors, ranks within panels, and regret of the predicted choice."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from meshwright.plan.spread import quantile
from meshwright.validate.ledger import Today
from meshwright.validate.load_test_row import FIGURES, LoadTestRow
from meshwright.validate.load_tests import LoadTestPrediction, spread_group
from meshwright.validate.score import grouped

# The smallest panel whose ranks count.
_LEAST_IN_PANEL = 5
# The names of FIGURES in the ledger.
_IN_LEDGER = {
    "tpot_seconds": "time per token",
    "ttft_seconds": "time to first token",
    "e2e_seconds": "request",
}


@dataclass(frozen=True)
class FigureScore:
    """Errors of one figure; None without rows. median_error: with its sign. covered: share within ranges."""

    num_rows: int
    median_abs_error: float | None
    p90_abs_error: float | None
    median_error: float | None
    covered: float | None


def load_test_document(predictions: Sequence[LoadTestPrediction]) -> dict[str, Any]:
    """The keys of `mw validate` for load tests in docs/reference/json.md."""
    known = _predicted(predictions)
    return {
        "figures": _scores(known),
        "ranks": {name: _ranks(known, name) for name in FIGURES},
        "regret": _regret(known),
        "modes": _by(known, lambda row: row.mode),
        "engines": _by(known, lambda row: row.engine),
        "systems": _by(known, lambda row: row.system),
        "models": _by(known, lambda row: f"{row.model} {row.weight_dtype}"),
        "skipped": sum(p.skipped is not None for p in predictions),
        "rows": [p.to_dict() for p in predictions],
    }


def errors_by_source(predictions: Sequence[LoadTestPrediction]) -> dict[tuple[str, str], Today]:
    """Today's errors for the ledger, by (source, figure); engines and pools of a source are apart."""

    def source(given: LoadTestPrediction) -> str:
        pools, engine, _, _ = spread_group(_test(given))
        return f"{given.row.source}, {engine}, {pools}"

    return {
        (str(name), title): _today(score_figure(group, figure))
        for name, group in grouped(_predicted(predictions), source).items()
        for figure, title in _IN_LEDGER.items()
    }


def _today(score: FigureScore) -> Today:
    return Today(score.num_rows, score.median_abs_error, score.p90_abs_error, score.covered)


def _predicted(predictions: Sequence[LoadTestPrediction]) -> list[LoadTestPrediction]:
    """The predictions of rows that were not skipped."""
    return [p for p in predictions if p.predicted and isinstance(p.row, LoadTestRow)]


def _scores(predictions: Sequence[LoadTestPrediction]) -> dict[str, dict[str, Any]]:
    return {name: asdict(score_figure(predictions, name)) for name in FIGURES}


def score_figure(predictions: Sequence[LoadTestPrediction], name: str) -> FigureScore:
    """The score of one of FIGURES."""
    errors = [error for p in predictions if (error := p.error(name)) is not None]
    sizes = sorted(map(abs, errors))
    signed = median(errors) if errors else None
    inside = [
        1 / (1 + p.spread(name).within) <= 1 + error <= 1 + p.spread(name).within
        for p in predictions
        if (error := p.error(name)) is not None
    ]
    covered = mean(inside) if inside else None
    return FigureScore(len(errors), quantile(sizes, 0.5), quantile(sizes, 0.9), signed, covered)


def _by(
    predictions: Sequence[LoadTestPrediction], key: Callable[[LoadTestRow], str]
) -> dict[str, dict[str, dict[str, Any]]]:
    groups = grouped(predictions, lambda p: key(_test(p)))
    return {str(name): _scores(group) for name, group in groups.items()}


def _test(given: LoadTestPrediction) -> LoadTestRow:
    assert isinstance(given.row, LoadTestRow), "only read rows have predictions"
    return given.row


def _ranks(predictions: Sequence[LoadTestPrediction], name: str) -> dict[str, Any] | None:
    """Spearman's rank correlation of a figure within panels; None without a large enough panel."""
    having = [p for p in predictions if name in _test(p).figures]
    panels = grouped(having, lambda p: _test(p).panel).values()
    scores = [
        _spearman([p.predicted[name] for p in panel if p.predicted], [_test(p).figures[name] for p in panel])
        for panel in panels
        if len(panel) >= _LEAST_IN_PANEL
    ]
    if not scores:
        return None
    return {"num_panels": len(scores), "median": median(scores), "p10": quantile(sorted(scores), 0.1)}


def _spearman(first: Sequence[float], second: Sequence[float]) -> float:
    import numpy as np

    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.asarray(np.corrcoef(np.array(ranks))).ravel()[1])


def _regret(predictions: Sequence[LoadTestPrediction]) -> dict[str, Any] | None:
    """Chip-seconds of a request of the choice predicted best, over the smallest measured, minus 1.

    A choice is an engine, its version and its layout, for one model, machine, load and concurrency.
    """

    def question(given: LoadTestPrediction) -> Hashable:
        row = _test(given)
        return (row.model, row.system, row.weight_dtype, row.prompt_len, row.output_len, row.concurrency)

    lost = []
    having = [p for p in predictions if "e2e_seconds" in _test(p).figures]
    for panel in grouped(having, question).values():
        if len({(p.layout, _test(p).engine, _test(p).engine_version) for p in panel}) < 2:
            continue
        chosen = min(panel, key=lambda p: (p.predicted or {})["e2e_seconds"] * _test(p).chips)
        costs = [_test(p).figures["e2e_seconds"] * _test(p).chips for p in panel]
        lost.append(_test(chosen).figures["e2e_seconds"] * _test(chosen).chips / min(costs) - 1)
    if not lost:
        return None
    return {"num_panels": len(lost), "mean": mean(lost), "p80": quantile(sorted(lost), 0.8)}
