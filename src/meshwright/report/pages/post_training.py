"""The page of a plan of post-training: the recommendation, every form, and each step along time."""

from pathlib import Path
from typing import Any

from meshwright.report.answer import answer_of_post_training, rollouts_words
from meshwright.report.moves import move_words, moves_table
from meshwright.report.pictures.phases import phases_figure
from meshwright.report.run_documents import read_json
from meshwright.report.table import Table
from meshwright.report.templating import render
from meshwright.units import format_bytes, format_seconds

_COLUMNS = (
    "form", "step|number", "idle|number", "price|number", "trainer|layout", "generator|layout",
    "servers|number", "sequences|number", "training|number", "rollouts|number",
)  # fmt: skip


def read_post_training(path: Path) -> dict[str, Any] | None:
    """The document of a plan of `mw plan rl`, given it or its TOML file; None for any other file."""
    document = read_json(path.with_suffix(".json")) if path.suffix in (".toml", ".json") else None
    return dict(document) if document and {"forms", "rollouts"} <= document.keys() else None


def post_training_html(document: dict[str, Any]) -> str:
    """The document of `mw plan rl` as one HTML page that loads nothing."""
    return render(
        "post_training.html.jinja",
        title=f"Post-training of {document['model']} on {document['hardware']}",
        written=f"{rollouts_words(document)} a step, {document['prompt_tokens']:,} tokens of prompt",
        answer=answer_of_post_training(document),
        table=forms_table(document),
        crossover=crossover_table(document) if document["crossover"] else None,
        move=move_words(document["forms"][0]["move"]),
        moves=moves_table(f"Moving weights, {document['best']}", document["forms"][0]["move"]["moves"]),
        figures=[phases_figure(form) for form in document["forms"]],
    )


def forms_table(document: dict[str, Any]) -> Table:
    """A row for each form, fastest first."""
    rows = []
    for form in document["forms"]:
        price = "" if form["price"] is None else f"{form['price']:.2f} {form['currency']}"
        generator = form["generator"]
        rows.append(
            (
                form["form"],
                format_seconds(form["step_seconds"]),
                f"{form['idle_share']:.0%}",
                price,
                f"{form['trainer']['hardware']}: {form['trainer']['layout']}",
                generator["layout"],
                f"{generator['replicas']:,}",
                f"{generator['batch']:,}",
                *(format_bytes(form["bytes_per_chip"][phase]) for phase in ("train", "roll out")),
            )
        )
    return Table.of("Forms of a step", _COLUMNS, rows, "training, rollouts: memory that a chip needs in each")


def crossover_table(document: dict[str, Any]) -> Table:
    """Seconds of a step by the mean length of a rollout."""
    first = document["crossover"][0]
    forms = [name for name in first if name != "output_tokens"]
    columns = ("tokens of a rollout|number", *(f"{name}|number" for name in forms))
    rows = [
        (f"{row['output_tokens']:,}", *(format_seconds(row[name]) for name in forms))
        for row in document["crossover"]
    ]
    return Table.of("Seconds of a step by length", columns, rows)
