"""mw support: the layouts that a model runs under, in training and in inference."""

from typing import Annotated

import typer

from meshwright.cli.command_options import command
from meshwright.cli.completions import models
from meshwright.cli.console import JSON, emit, show
from meshwright.layout.examples import LAYOUTS, PHASES, layout_example, phases_of
from meshwright.models.config import ModelConfig
from meshwright.models.presets import load_model

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@command(app)
def support(
    model: Annotated[
        str,
        typer.Argument(help="A preset, a config.json, a checkpoint folder or a TOML.", autocompletion=models),
    ],
    as_json: bool = JSON,
) -> None:
    """Show the layouts that train, prefill and generate a model here, and why others do not.

    Each row is an example of the smallest degree; axes can be combined.

    \b
    mw support mixtral-8x7b
    """
    config = load_model(model)
    document = support_document(config)
    if as_json:
        emit(document)
    else:
        show(_table(document))


def support_document(config: ModelConfig) -> dict:
    """The document of `mw support`: per layout and phase whether it `runs`, and the `reason` if not."""
    rows = [
        {
            "feature": feature,
            "layout": layout_example(feature, config),
            "phases": {
                phase: {"runs": reason is None, "reason": reason}
                for phase, reason in phases_of(feature, config).items()
            },
        }
        for feature in LAYOUTS
    ]
    return {"model": config.name, "layouts": rows}


def _table(document: dict) -> object:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("layout", *PHASES.values(), "what does not run"):
        table.add_column(name)
    for row in document["layouts"]:
        phases = row["phases"].values()
        # A reason that phases share is shown once.
        reasons = dict.fromkeys(phase["reason"] for phase in phases if not phase["runs"])
        cells = ("runs" if phase["runs"] else "no" for phase in phases)
        table.add_row(row["layout"], *cells, "; ".join(reasons))
    return table
