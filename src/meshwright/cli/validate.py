"""mw validate: errors of the planner against published measurements."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from meshwright.cli.command_options import command
from meshwright.cli.console import JSON, emit, note, progress, show
from meshwright.errors import PlanError
from meshwright.layout.axes import CONTEXT, EXPERT, PIPE, TENSOR
from meshwright.options import option
from meshwright.validate.alike import TRUST
from meshwright.validate.ledger import FirstLook, covered, first_look_medians, with_today
from meshwright.validate.ledger import ledger as ledger_of
from meshwright.validate.load_test_row import LoadTestRow
from meshwright.validate.out_of_sample import out_of_sample
from meshwright.validate.published import TableRow, UnreadRow, read_rows
from meshwright.validate.score import (
    Prediction,
    Ranking,
    Score,
    anchored_by_source,
    grouped,
    inference_rows,
    memory_predictions,
    memory_verdicts,
    predict,
    quantile,
    rankings,
    score_predictions,
    step_rows,
)

app = typer.Typer(add_completion=False, rich_markup_mode=None)
# Words for the figures of memory that a row may have (`Prediction.memory_figure`).
_OF_MEMORY = {
    "allocated": "of allocated arrays",
    "reserved": "as reserved by the allocator",
    "device": "as the driver reports",
}
_MISSES = 1
_SMALL_REGRET = 0.05
# The bars of each score: (median, 90th percentile). Free predictions have to meet theirs also on tables not
# used to make the cost model.
_FREE, _ANCHORED, _SERVED = (0.08, 0.25), (0.05, 0.20), (0.12, 0.35)


@command(app)
def validate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Tables of published results, scored together.", metavar="FILE.csv"),
    ] = None,
    ledger: bool = option(False, help="Print the errors at the first look at each source, and today's."),
    anchor: bool = option(False, help="Correct each source and chip by its first two rows."),
    trust: float = option(
        TRUST,
        least=0,
        most=1,
        help="With --anchor: share of a row's log error that a row just like it has.",
    ),
    median_bar: float | None = option(
        None,
        least=0,
        help="Largest median error that passes.",
        unset="0.08; 0.05 with --anchor; 0.12 of serving",
    ),
    p90_bar: float | None = option(
        None,
        least=0,
        help="Largest 90th percentile that passes.",
        unset="0.25; 0.20 with --anchor; 0.35 of serving",
    ),
    memory_bar: float = option(0.08, least=0, help="Largest median error of memory that passes."),
    regret_bar: float = option(0.05, least=0, help="Largest 80th percentile of regret that passes."),
    rows: bool = option(False, help="List every row."),
    as_json: bool = JSON,
) -> None:
    """Predict every row of a table of published results, and report the errors.

    A row that cannot be read or expressed is skipped with its reason. Exits 1 if an error exceeds its bar.

    \b
    mw validate benchmarks/published/training.csv --anchor
    """
    if not files and not ledger:
        raise PlanError("mw validate takes a table of published results, or --ledger")
    table = [row for file in files or () for row in read_rows(file)]
    if any(isinstance(row, LoadTestRow) for row in table):
        _validate_load_tests(table, median_bar, p90_bar, rows, as_json, ledger=ledger)
        return
    with progress() as update:
        predictions = predict(
            [row for row in table if not isinstance(row, LoadTestRow)],
            lambda share: update("pricing rows", share),
            in_processes=True,
        )
    if ledger:
        return _print_ledger(ledger_of(predictions), as_json)
    if anchor:
        predictions = anchored_by_source(predictions, trust)
    bars = _SERVED if inference_rows(predictions) else _ANCHORED if anchor else _FREE
    bars = (bars[0] if median_bar is None else median_bar, bars[1] if p90_bar is None else p90_bar)
    document = validation_document(predictions, anchor)
    missed = _missed(document, bars, memory_bar, regret_bar)
    _finish(document, missed, lambda: _show(document, rows), as_json=as_json)


def _validate_load_tests(
    table: list[TableRow | UnreadRow],
    median_bar: float | None,
    p90_bar: float | None,
    list_rows: bool,
    as_json: bool,
    *,
    ledger: bool,
) -> None:
    """Predict rows of load tests by simulation. Raises PlanError if other rows are among them."""
    tests = [row for row in table if isinstance(row, LoadTestRow | UnreadRow)]
    if len(tests) < len(table):
        raise PlanError("load tests have scores of their own; give their tables in a separate command")
    from meshwright.cli.load_test_output import missed_bars, show_load_tests
    from meshwright.validate.load_test_scores import errors_by_source, load_test_document
    from meshwright.validate.load_tests import predict_load_tests

    with progress() as update:
        predictions = predict_load_tests(
            tests, lambda share: update("simulating load tests", share), in_processes=True
        )
    if ledger:
        return _print_ledger(with_today(errors_by_source(predictions)), as_json)
    document = load_test_document(predictions)
    missed = missed_bars(document, median_bar, p90_bar)
    _finish(document, missed, lambda: show_load_tests(document, list_rows), as_json=as_json)


def _finish(
    document: dict[str, Any], missed: list[str], tables: Callable[[], None], *, as_json: bool
) -> None:
    """Print scores, as JSON or by `tables`. Exits 1 if they miss a bar."""
    document["missed"] = missed
    if as_json:
        emit(document)
    else:
        tables()
    for line in missed:
        note(f"mw: {line}")
    if missed:
        raise typer.Exit(_MISSES)


def _print_ledger(lines: list[FirstLook], as_json: bool) -> None:
    document = {**first_look_medians(lines), "ledger": [asdict(line) for line in lines]}
    if as_json:
        emit(document)
    else:
        show(_ledger_table(lines), _ledger_line(document))


def _ledger_table(lines: list[FirstLook]) -> object:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    for heading in (
        "source",
        "figure",
        "rows",
        "first: median",
        "p90",
        "today: median",
        "p90",
        "in range",
        "met",
    ):
        table.add_column(heading, justify="left" if heading in ("source", "figure", "met") else "right")
    for line in lines:
        first = (line.first_median, line.first_p90)
        figures = map(_percent, (*first, line.today_median, line.today_p90, line.covered))
        table.add_row(line.source, line.figure, str(line.rows), *figures, line.met)
    return table


def _ledger_line(scored: dict) -> str:
    return (
        f"first looks at step times of {scored['sources']} sources, {scored['rows']} rows: median "
        f"{_percent(scored['first_median'])}, p90 {_percent(scored['first_p90'])} (medians over sources)"
    )


def validation_document(predictions: list[Prediction], anchor: bool) -> dict:
    """The keys of `mw validate` in docs/reference/json.md, then scores by source, of memory and of regret."""
    steps = step_rows(predictions) or inference_rows(predictions)
    ranked = rankings(predictions)
    return {
        **asdict(score_predictions(steps)),
        "anchored": anchor,
        "covered": None if anchor else covered(predictions),
        "out_of_sample": asdict(score_predictions(out_of_sample(steps))),
        "sources": _by(steps, lambda p: p.row.source),
        "chips": _by(steps, lambda p: p.row.chip),
        "softwares": _by(steps, lambda p: getattr(p.row, "software", None) or "not stated"),
        "degrees": {
            axis.name: _by(steps, lambda p, name=axis.name: str(getattr(p.row, name, None) or 1))
            for axis in (TENSOR, PIPE, CONTEXT, EXPERT)
        },
        "memory": {
            **asdict(score_predictions(memory_predictions(predictions))),
            "figures": Counter(
                p.memory_figure for p in memory_predictions(predictions) if p.memory_figure is not None
            ),
        },
        "verdicts": asdict(memory_verdicts(predictions)),
        "regret": quantile(sorted(r.regret for r in ranked), 0.8),
        "ranking": _ranking(ranked),
        "rankings": [asdict(r) for r in ranked],
        "skipped": sum(p.skipped is not None for p in predictions),
        "rows": [p.to_dict() for p in predictions],
    }


def _by(steps: list[Prediction], key: Callable[[Prediction], str]) -> dict[str, dict]:
    """The scores of the rows by a key of each row."""
    return {
        str(name): _source(score_predictions(group), group) for name, group in grouped(steps, key).items()
    }


def _ranking(ranked: list[Ranking]) -> dict | None:
    """Means over panels; None without panels."""
    if not ranked:
        return None
    names = ("tau", "regret", "best_of_five", "rule_regret", "random_regret")
    return {f"mean_{name}": mean(getattr(panel, name) for panel in ranked) for name in names} | {
        "num_panels": len(ranked),
        "share_under_5_percent": mean(panel.regret < _SMALL_REGRET for panel in ranked),
    }


def _source(score: Score, group: list[Prediction]) -> dict:
    errors = [p.error for p in group if p.error is not None]
    return asdict(score) | {"mean_error": sum(errors) / len(errors)}


def _missed(document: dict, bars: tuple[float, float], memory_bar: float, regret_bar: float) -> list[str]:
    """One line for each bar that is missed."""
    if not document["num_rows"] and not document["memory"]["num_rows"]:
        return [f"no row could be priced; {_first_reason(document)}"]
    checks = (
        ("median error", document["median_abs_error"], bars[0]),
        ("90th percentile of the errors", document["p90_abs_error"], bars[1]),
        ("median error of memory", document["memory"]["median_abs_error"], memory_bar),
        ("regret of four panels in five", document["regret"], regret_bar),
    )
    return [
        f"{name} is {value:.1%}, above {bar:.1%}"
        for name, value, bar in checks
        if value is not None and value > bar
    ]


def _first_reason(document: dict) -> str:
    return next((row["skipped"] for row in document["rows"] if row["skipped"]), "the file has no rows")


def _show(document: dict, list_rows: bool) -> None:
    from rich.table import Table

    has_baseline = document["baseline_median_abs_error"] is not None
    headings = ("rows", "median", "p90", "mean", *(("one MFU: median", "p90") if has_baseline else ()))
    table = Table(box=None, padding=(0, 2))
    table.add_column("source of rows")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, score in (*document["sources"].items(), ("all", document)):
        figures = map(_percent, _figures(score)[: len(headings) - 1])
        table.add_row(name, str(score["num_rows"]), *figures)
    show(
        *_outside_lines(document["out_of_sample"]),
        table,
        *([_rows_table(document)] if list_rows else []),
        f"within 10%: {_percent(document['within_10_percent'])}, "
        f"within 20%: {_percent(document['within_20_percent'])}",
        *_covered_lines(document["covered"]),
        *_memory_lines(document["memory"], document["verdicts"]),
        *([_ranking_line(document["ranking"])] if document["ranking"] else []),
        *(f"{row['id']}: skipped: {row['skipped']}" for row in document["rows"] if row["skipped"]),
    )


def _outside_lines(outside: dict) -> list[str]:
    if not outside["num_rows"]:
        return []
    line = (
        f"out of sample, {outside['num_rows']} rows: median {_percent(outside['median_abs_error'])}, "
        f"p90 {_percent(outside['p90_abs_error'])}"
    )
    if outside["baseline_median_abs_error"] is None:
        return [line]
    both = outside["baseline_median_abs_error"], outside["baseline_p90_abs_error"]
    return [f"{line}; one MFU of the other sources: {', '.join(map(_percent, both))}"]


def _covered_lines(share: float | None) -> list[str]:
    return [] if share is None else [f"inside the stated ranges (8 of 10 rows of a new source): {share:.1%}"]


def _memory_lines(memory: dict, verdicts: dict) -> list[str]:
    lines = []
    if memory["num_rows"]:
        figures = ", ".join(f"{number} {_OF_MEMORY[name]}" for name, number in memory["figures"].items())
        which = f" ({figures})" if figures else ""
        lines.append(
            f"memory, {memory['num_rows']} rows{which}: median {_percent(memory['median_abs_error'])}, "
            f"p90 {_percent(memory['p90_abs_error'])}"
        )
    ran, ran_out = verdicts["num_ran"], verdicts["num_ran_out"]
    if ran:
        lines.append(f"ran, predicted not to fit: {_percent(verdicts['false_does_not_fit'])} of {ran}")
    if ran_out:
        lines.append(f"ran out, predicted to fit: {_percent(verdicts['false_fits'])} of {ran_out}")
    return lines


def _ranking_line(ranking: dict) -> str:
    names = ("regret", "best_of_five", "rule_regret", "random_regret")
    first, five, rule, random = (_percent(ranking[f"mean_{name}"]) for name in names)
    return (
        f"{ranking['num_panels']} panels of layouts, or of batches: tau {ranking['mean_tau']:.2f}; the one "
        f"ranked first loses {first} (under 5% in {_percent(ranking['share_under_5_percent'])} of them), the "
        f"best of five {five}; by the rule of thumb {rule}, at random {random}"
    )


def _figures(score: dict) -> tuple[float | None, ...]:
    keys = ("median_abs_error", "p90_abs_error", "mean_error")
    return tuple(score.get(key) for key in (*keys, "baseline_median_abs_error", "baseline_p90_abs_error"))


def _rows_table(document: dict) -> object:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    for heading in ("id", "published", "predicted", "error", "layout"):
        table.add_column(heading, justify="left" if heading in ("id", "layout") else "right")
    for row in document["rows"]:
        if row["predicted"] is not None:
            figures = f"{row['published']:.5g}", f"{row['predicted']:.5g}", f"{row['error']:+.1%}"
            table.add_row(row["id"], *figures, row["layout"])
    return table


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
