"""mw export: a run's checkpoint for Hugging Face."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.command_options import command
from meshwright.cli.console import JSON, emit, waiting
from meshwright.errors import MeshwrightError
from meshwright.files import check_writable
from meshwright.nn.start.devices import use_cpu_devices
from meshwright.options import REQUIRED, option
from meshwright.train.job import check_run
from meshwright.units import parse_count

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@command(app)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    output: Path = option(REQUIRED, flag="-o", help="The folder to write."),
    step: int | None = option(
        None, parser=parse_count, help="Export the checkpoint of this step.", unset="the last"
    ),
    best: bool = option(False, help="Export the checkpoint with the lowest validation loss."),
    as_json: bool = JSON,
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
    from meshwright.train.hf_export import export_run

    with waiting("writing the model"):
        step = export_run(run, output, step=step, best=best)
    if as_json:
        emit({"path": str(output), "step": step})
    else:
        print(f"step {step} in {output}")
