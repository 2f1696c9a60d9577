"""mw launch: a command as many processes, here, under SLURM or on Kubernetes."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from meshwright.cli.common import note, number_option, whole_option
from meshwright.errors import MeshwrightError
from meshwright.files import write_whole
from meshwright.launch.cluster_job import cluster_job
from meshwright.launch.k8s import as_yaml, jobset
from meshwright.launch.local import launch_local
from meshwright.launch.ray_service import ray_service
from meshwright.launch.slurm import slurm_script

app = typer.Typer(add_completion=False, rich_markup_mode=None)
# What follows `--` is the command, options and all.
_COMMAND = {"ignore_unknown_options": False, "allow_interspersed_args": False}

Timeout = Annotated[
    float,
    number_option("--timeout", metavar="SECONDS", help="How long the processes may take to find each other."),
]
Command = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="mw train plan.toml ...")]


@app.callback()
def launch() -> None:
    """Start a command as several processes that train as one.

    \b
    mw launch local -n 4 -- mw train plan.toml --data stdlib --run runs/four
    """


@app.command(context_settings=_COMMAND)
def local(
    command: Command,
    processes: Annotated[int, whole_option("--processes", "-n", most=1024, help="Number of processes.")],
    restarts: Annotated[
        int,
        whole_option(
            "--restarts", least=0, help="Restart from the last checkpoint up to N times if a process dies."
        ),
    ] = 0,
    port: Annotated[
        int | None, whole_option("--port", most=65535, help="Port of process 0. [default: a free one]")
    ] = None,
    timeout: Timeout = 300.0,
) -> None:
    """Run a command as several processes on this machine.

    The processes share its devices. If one dies, the others are ended within seconds, and the message names
    the one that died.

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


Restarts = Annotated[
    int, whole_option("--restarts", least=0, help="Restart up to N times if a process or a node dies.")
]
Name = Annotated[str | None, typer.Option(help="The job's name. [default: the model's]")]
Output = Annotated[Path | None, typer.Option("-o", help="The file to write. [default: stdout]")]


@app.command(context_settings=_COMMAND)
def slurm(
    command: Command,
    output: Output = None,
    name: Name = None,
    time: Annotated[str, typer.Option(help="SLURM's time limit.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="SLURM's partition.")] = None,
    restarts: Restarts = 100,
    timeout: Timeout = 600.0,
) -> None:
    """Write an sbatch script with one process per GPU.

    A pipeline whose stages run programs of their own has one process for all GPUs of its node. The job is
    queued again until the run is done.

    \b
    mw launch slurm -o job.sh -- mw train plan.toml --data corpus --run /shared/run && sbatch job.sh
    """
    job = cluster_job(command, name, restarts)
    _write(slurm_script(job, time_limit=time, partition=partition, join_seconds=timeout), output)


@app.command(context_settings=_COMMAND)
def k8s(
    command: Command,
    image: Annotated[str, typer.Option(help="A container image with meshwright and JAX for the chips.")],
    output: Output = None,
    name: Name = None,
    volume: Annotated[
        str | None, typer.Option(help="A PersistentVolumeClaim that all pods mount at /runs.")
    ] = None,
    restarts: Restarts = 100,
    timeout: Timeout = 600.0,
    serve: Annotated[
        bool, typer.Option("--serve", help="Write a RayService with a pod per replica of mw serve.")
    ] = False,
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
    job = cluster_job(command, name, restarts)
    _write(as_yaml(jobset(job, image=image, volume=volume, join_seconds=timeout)), output)


def _ray_service(command: list[str], name: str | None, image: str, volume: str | None) -> dict[str, Any]:
    from meshwright.cli.serve import app as serve_app
    from meshwright.cli.serve import autoscaling_settings

    if command[:2] != ["mw", "serve"]:
        raise MeshwrightError(f"--serve is for mw serve, not for {' '.join(command[:2])!r}")
    asked = get_command(serve_app).make_context("mw serve", command[2:]).params
    least = most = 0
    for pool, number in (("autoscaling", "replicas"), ("prefill_autoscaling", "prefill_replicas")):
        settings = autoscaling_settings(asked[pool])
        always = str(asked[number])
        least += int(settings.get("min_replicas", always))
        most += int(settings.get("max_replicas", always))
    job = cluster_job(command, name, 0, resumes=False)
    return ray_service(job, image=image, volume=volume, replicas=least, most=most, port=asked["port"])


def _write(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
    else:
        note(f"wrote {write_whole(output, text)}")
