"""mw launch: a command as many processes, here, under SLURM or on Kubernetes."""

from typing import Annotated

import typer

from meshwright.cli.common import note
from meshwright.errors import MeshwrightError
from meshwright.train.launch.local import launch_local

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
# What follows `--` is the command, options and all.
_COMMAND = {"ignore_unknown_options": False, "allow_interspersed_args": False}

Command = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="mw train plan.toml ...")]


@app.callback()
def launch() -> None:
    """Start a command as many processes that train as one.

    \b
    mw launch local -n 4 -- mw train plan.toml --data stdlib --run runs/four
    """


@app.command(context_settings=_COMMAND)
def local(
    command: Command,
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, help="How many.")],
    restarts: Annotated[
        int, typer.Option(min=0, help="Start again from the last checkpoint so often, where one dies.")
    ] = 0,
    port: Annotated[int | None, typer.Option(help="Where process 0 listens. [a free one]")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for all to find each other.")] = 300.0,
) -> None:
    """Run a command as several processes of this machine, which share its devices.

    Where one dies, all are ended within seconds, and the process that died is named.

    \b
    mw launch local -n 4 --restarts 3 -- mw train plan.toml --data stdlib --run runs/four
    """
    if not command:
        raise MeshwrightError("no command: write it after --, as in mw launch local -n 4 -- mw train ...")
    code = launch_local(
        command,
        processes,
        restarts=restarts,
        port=port,
        join_seconds=timeout,
        say=lambda text: note(f"mw: {text}"),
    )
    raise typer.Exit(code)
