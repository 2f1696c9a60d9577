"""mw export: a run's checkpoint for Hugging Face."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import Json, count_option, emit, waiting
from meshwright.errors import MeshwrightError
from meshwright.files import check_writable
from meshwright.nn.start.devices import use_cpu_devices
from meshwright.train.job import check_run

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    output: Annotated[Path, typer.Option("-o", help="The folder to write.")],
    step: Annotated[
        int | None, count_option("--step", help="Export the checkpoint of this step. [default: the last]")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the checkpoint with the lowest validation loss.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a run's checkpoint as a Hugging Face model: config, safetensors, tokenizer.

    \b
    mw export runs/demo -o exported --best
    """
    if best and step is not None:
        raise MeshwrightError("--best and --step name two checkpoints; leave one out")
    check_run(run)
    check_writable(output / "config.json")
    use_cpu_devices(1)
    from meshwright.train.export import export_run

    with waiting("writing the model"):
        step = export_run(run, output, step=step, best=best)
    if as_json:
        emit({"path": str(output), "step": step})
    else:
        print(f"step {step} in {output}")
