"""The output of mw validate for tables of load tests."""

from meshwright.cli.console import show
from meshwright.validate.load_test_row import FIGURES

# (median, 90th percentile) that pass, and the rank correlation within panels.
BARS = {"tpot_seconds": (0.12, 0.35), "ttft_seconds": (0.25, 0.70), "e2e_seconds": (0.12, None)}
RANK_BAR = 0.85
_HEADINGS = {"tpot_seconds": "time per token", "ttft_seconds": "first token", "e2e_seconds": "request"}


def missed_bars(document: dict, median_bar: float | None, p90_bar: float | None) -> list[str]:
    """One line for each bar that is missed. median_bar, p90_bar: of the time per token, if given."""
    bars = BARS | {
        "tpot_seconds": (median_bar or BARS["tpot_seconds"][0], p90_bar or BARS["tpot_seconds"][1])
    }
    if not document["figures"]["ttft_seconds"]["num_rows"]:
        reason = next((row["skipped"] for row in document["rows"] if row["skipped"]), "the file has no rows")
        return [f"no row could be priced; {reason}"]
    lines = []
    for name, limits in bars.items():
        keys = ("median_abs_error", "p90_abs_error")
        for what, key, bar in zip(("median error", "90th percentile"), keys, limits, strict=True):
            value = document["figures"][name][key]
            if None not in (bar, value) and value > bar:
                lines.append(f"{_HEADINGS[name]}: {what} is {value:.1%}, above {bar:.1%}")
    ranks = document["ranks"]["tpot_seconds"]
    if ranks and ranks["median"] < RANK_BAR:
        lines.append(f"rank correlation within panels is {ranks['median']:.2f}, below {RANK_BAR}")
    return lines


def show_load_tests(document: dict, list_rows: bool) -> None:
    """Print tables of errors by mode, engine, machine and model."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    table.add_column("load tests")
    for heading in ("rows", *(word for name in FIGURES for word in (f"{_HEADINGS[name]}: median", "p90"))):
        table.add_column(heading, justify="right")
    groups = [document[key].items() for key in ("modes", "engines", "systems", "models")]
    for name, scores in (*(pair for group in groups for pair in group), ("all", document["figures"])):
        table.add_row(name, str(scores["ttft_seconds"]["num_rows"]), *_figures(scores))
    ranks, regret = document["ranks"]["tpot_seconds"], document["regret"]
    show(
        table,
        *([_rows(document)] if list_rows else []),
        *(
            [f"rank correlation in {ranks['num_panels']} panels: median {ranks['median']:.2f}"]
            if ranks
            else []
        ),
        *(
            [f"regret in {regret['num_panels']} choices: mean {regret['mean']:.1%}, p80 {regret['p80']:.1%}"]
            if regret
            else []
        ),
        *(
            [f"80% ranges hold: {', '.join(covered)}"]
            if (
                covered := [
                    f"{_HEADINGS[name]} {scores['covered']:.0%}"
                    for name, scores in document["figures"].items()
                    if scores["covered"] is not None
                ]
            )
            else []
        ),
        *(f"{row['id']}: skipped: {row['skipped']}" for row in document["rows"] if row["skipped"]),
    )


def _figures(scores: dict) -> list[str]:
    keys = ("median_abs_error", "p90_abs_error")
    values = [scores[name][key] for name in FIGURES for key in keys]
    return ["" if value is None else f"{value:.1%}" for value in values]


def _rows(document: dict) -> object:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2))
    table.add_column("id")
    for name in FIGURES:
        for heading in (_HEADINGS[name], "predicted", "error", "range"):
            table.add_column(heading, justify="right")
    table.add_column("layout")
    for row in document["rows"]:
        if row["predicted"]:
            cells = [
                text
                for name in FIGURES
                for text in (
                    f"{row['published'][name]:.4g}" if name in row["published"] else "",
                    # Without an answer there is no time per token.
                    f"{row['predicted'][name]:.4g}" if row["predicted"][name] else "",
                    f"{row['errors'][name]:+.1%}" if name in row["published"] else "",
                    "{:.3g} to {:.3g}".format(*row["range"][name]) if row["predicted"][name] else "",
                )
            ]
            table.add_row(row["id"], *cells, row["layout"])
    return table
