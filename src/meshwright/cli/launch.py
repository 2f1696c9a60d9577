"""mw launch: a command as several processes, on this machine, under SLURM or on Kubernetes."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from meshwright.cli.command_options import OptionsOf, command, values_of
from meshwright.cli.console import note
from meshwright.cli.line_pieces import LAUNCHED
from meshwright.errors import MeshwrightError
from meshwright.files import write_whole
from meshwright.launch.cluster_job import cluster_job
from meshwright.launch.k8s import as_yaml, jobset
from meshwright.launch.local import launch_local
from meshwright.launch.ray_service import ray_service
from meshwright.launch.slurm import slurm_script
from meshwright.options import REQUIRED, option

app = typer.Typer(add_completion=False, rich_markup_mode=None)
# The command with its options follows `--`.
_COMMAND = {"ignore_unknown_options": False, "allow_interspersed_args": False}
Command = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="mw train plan.toml ...")]
_JOIN = "How long the processes may take to find each other."
_OUTPUT: Path | None = option(None, flag="-o", help="The file to write.", unset="stdout")
_NAME: str | None = option(None, flag="--name", help="The job's name.", unset="the model's")
_RESTARTS = option(100, flag="--restarts", least=0, help="Restart up to N times if a process or a node dies.")
_TIMEOUT = option(600.0, flag="--timeout", metavar="SECONDS", least=0, help=_JOIN)


@app.callback()
def launch() -> None:
    """Start a command as several processes that train as one.

    \b
    mw launch local -n 4 -- mw train plan.toml --data stdlib --run runs/four
    """


@command(app, context_settings=_COMMAND)
def local(
    command: Command,
    processes: int = option(REQUIRED, flag="--processes -n", least=1, most=1024, help="Number of processes."),
    restarts: int = option(
        0, least=0, help="Restart from the last checkpoint up to N times if a process dies."
    ),
    port: int | None = option(None, least=1, most=65535, help="Port of process 0.", unset="a free one"),
    timeout: float = option(300.0, metavar="SECONDS", least=0, help=_JOIN),
) -> None:
    """Run a command as several processes on this machine.

    The processes share its devices. If one dies, the others are ended within seconds, and the message names
    the one that died.

    \b
    mw launch local -n 4 --restarts 3 -- mw train plan.toml --data stdlib --run runs/four
    """
    if not command:
        raise MeshwrightError("no command: write it after --, as in mw launch local -n 4 -- mw train ...")
    _check(command, "local -n 4")
    code = launch_local(
        command,
        processes,
        restarts=restarts,
        port=port,
        join_seconds=timeout,
        say=lambda text: note(f"mw: {text}"),
    )
    raise typer.Exit(code)


def _check(command: list[str], launcher: str) -> None:
    """Raise MeshwrightError for a plan in place of a command, and for a command of mw without `mw`."""
    if command and command[0].endswith(".toml"):
        raise MeshwrightError(
            f"{command[0]} is no command; write mw launch {launcher} -- mw train {' '.join(command)}"
        )
    if command and command[0] in LAUNCHED and shutil.which(command[0]) is None:
        raise MeshwrightError(
            f"{command[0]} is a command of mw; write mw launch {launcher} -- mw {' '.join(command)}"
        )


@command(app, context_settings=_COMMAND)
def slurm(
    command: Command,
    output: Path | None = _OUTPUT,
    name: str | None = _NAME,
    time: str = option("24:00:00", help="SLURM's time limit."),
    partition: str | None = option(None, help="SLURM's partition."),
    restarts: int = _RESTARTS,
    timeout: float = _TIMEOUT,
) -> None:
    """Write an sbatch script with one process per GPU.

    A pipeline whose stages run programs of their own has one process for all GPUs of its node. The job is
    queued again until the run is done.

    \b
    mw launch slurm -o job.sh -- mw train plan.toml --data corpus --run /shared/run && sbatch job.sh
    """
    _check(command, "slurm")
    job = cluster_job(command, name, restarts)
    _write(slurm_script(job, time_limit=time, partition=partition, join_seconds=timeout), output)


@command(app, context_settings=_COMMAND)
def k8s(
    command: Command,
    image: str = option(REQUIRED, help="A container image with meshwright and JAX for the chips."),
    output: Path | None = _OUTPUT,
    name: str | None = _NAME,
    volume: str | None = option(None, help="A PersistentVolumeClaim that all pods mount at /runs."),
    restarts: int = _RESTARTS,
    timeout: float = _TIMEOUT,
    serve: bool = option(False, help="Write a RayService with a pod per replica of mw serve."),
) -> None:
    """Write a Kubernetes JobSet, or with --serve a RayService.

    A JobSet for GKE has one pod per node of the plan's TPUs or GPUs; a RayService one pod per replica.

    \b
    mw launch k8s --image IMAGE --volume runs -- mw train plan.toml --data /runs/text --run /runs/a
    mw launch k8s --serve --image IMAGE --volume runs -- mw serve --checkpoint /runs/a plan.toml --replicas 4
    """
    if serve:
        _write(as_yaml(_ray_service(command, name, image, volume)), output)
        return
    _check(command, f"k8s --image {image}")
    job = cluster_job(command, name, restarts)
    _write(as_yaml(jobset(job, image=image, volume=volume, join_seconds=timeout)), output)


def _ray_service(command: list[str], name: str | None, image: str, volume: str | None) -> dict[str, Any]:
    from meshwright.cli.serve import app as serve_app
    from meshwright.serve.settings import Replicas

    if command[:2] != ["mw", "serve"]:
        raise MeshwrightError(f"--serve is for mw serve, not for {' '.join(command[:2])!r}")
    values = get_command(serve_app).make_context("mw serve", command[2:]).params
    least = most = 0
    for number, scaling in Replicas(**values_of(OptionsOf(Replicas), values)).pools:
        least += int(scaling.get("min_replicas", number))
        most += int(scaling.get("max_replicas", number))
    job = cluster_job(command, name, 0, resumes=False)
    return ray_service(job, image=image, volume=volume, replicas=least, most=most, port=values["port"])


def _write(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
    else:
        note(f"wrote {write_whole(output, text)}")
