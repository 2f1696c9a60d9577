"""mw bench: measurements on this machine, compared with predictions."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from meshwright.api.inputs import Train
from meshwright.cli import bench_serve
from meshwright.cli.command_options import command
from meshwright.cli.console import (
    HARDWARE_HELP,
    JSON,
    LOCAL_HARDWARE,
    PROCESSES,
    emit,
    note,
    progress,
    refuse_with,
    show,
)
from meshwright.errors import MeshwrightError, PlanError
from meshwright.files import check_writable, write_whole
from meshwright.hardware import catalog
from meshwright.nn.start.devices import use_devices_of
from meshwright.options import option
from meshwright.plan_file import Plan, load_plan
from meshwright.units import format_bytes, format_count, format_seconds, parse_count, parse_length

app = typer.Typer(add_completion=False, rich_markup_mode=None)
command(app)(bench_serve.serve)
# Ranked layouts: more than exist for a small machine, so that no combination of axes is cut off.
_MOST_RANKED = 10_000
_Column = tuple[str, Callable[[dict[str, Any]], str]]

# Searches of common sizes: (model, hardware, sequences, sequence length).
_SEARCHES = (
    ("demo", "cpu:8", 32, 256),
    ("llama-3-8b", "v5e:16x16", 512, 4096),
    ("llama-3-70b", "h100:64x8", 1024, 8192),
    ("llama-3-70b", "v5p:16x20x28", 1024, 4096),
)


@app.callback()
def bench() -> None:
    """Benchmark collectives and matmuls of this machine, a server, or the planner."""


@command(app, name="collectives")
def bench_collectives(
    hardware: str = option("cpu:8", help=HARDWARE_HELP),
    mesh: str | None = option(
        None, help="Mesh axes to measure, each and together: X=4,Y=2.", unset="two axes"
    ),
    sizes: str | None = option(
        None, help="Sizes of the gathered array in bytes: 1Ki,64Ki,1Mi.", unset="1Ki to 256Mi"
    ),
    processes: int = PROCESSES,
    max_seconds: float = option(120.0, least=1, help="Time limit; sizes left when it ends are skipped."),
    plot: bool = option(False, help="Plot measurements and model in the terminal."),
    html: Path | None = option(None, help="Write the charts as one HTML page."),
    as_json: bool = JSON,
) -> None:
    """Time every collective over every choice of mesh axes.

    Each line shows the measured time next to the model fitted to all of them.

    \b
    mw bench collectives --hardware cpu:8 --mesh X=4,Y=2
    mw bench collectives --hardware cpu:4 --processes 4 --sizes 64Ki,1Mi --plot
    mw bench collectives --hardware h100:8
    """
    if html:
        check_writable(html)
    document = _sweep(hardware, mesh, _sizes(sizes), processes, max_seconds)
    columns: list[_Column] = [
        ("operation", lambda r: r["op"]),
        ("axes", lambda r: "".join(r["axes"])),
        ("devices", lambda r: str(r["num_devices"])),
        ("V", lambda r: format_bytes(r["bytes"])),
        ("spread", lambda r: f"{r['spread']:.0%}"),
    ]
    _print(document, "Collectives", columns, as_json)
    for left in document["left_out"]:
        note(f"left out {format_bytes(left['bytes'])}: not enough {left['reason']}")
    _draw(document, plot, html)


def _sweep(
    hardware: str, mesh: str | None, sizes: Sequence[int] | None, processes: int, max_seconds: float
) -> dict[str, Any]:
    """The measurement, in this process or in several."""
    from meshwright.bench import local_processes as several
    from meshwright.bench import sizes as choices
    from meshwright.notation.parse import parse_mesh

    machine = catalog.load(hardware)
    chosen = parse_mesh(mesh) if mesh else choices.group_mesh(machine.num_chips)
    machine.place(chosen)
    sizes = sizes or choices.SWEEP
    with progress() as report:
        if processes > 1:
            report(f"measuring over {processes} processes", None)
            return several.sweep_in_processes(hardware, chosen.sizes, sizes, max_seconds, processes)
        use_devices_of(machine)
        from meshwright.bench.sweep import sweep

        return sweep(hardware, chosen, lambda what: report(what, None), sizes, max_seconds)


def _sizes(text: str | None) -> list[int] | None:
    try:
        return [parse_count(size) for size in text.split(",")] if text else None
    except MeshwrightError as error:
        raise typer.BadParameter(str(error), param_hint="--sizes") from error


def _draw(document: dict[str, Any], plot: bool, html: Path | None) -> None:
    if not (plot or html):
        return
    from meshwright.report.pages.measured_collectives import collectives_html, measured_ops, terminal_plot

    if plot:
        for op in measured_ops(document):
            note(terminal_plot(document, op))
    if html:
        write_whole(html, collectives_html(document))
        note(f"wrote {html}")


@command(app)
def matmul(hardware: str = LOCAL_HARDWARE, as_json: bool = JSON) -> None:
    """Time a Transformer's matmuls on all devices at once.

    \b
    mw bench matmul --hardware cpu:8
    """
    use_devices_of(catalog.load(hardware))
    from meshwright.bench.matmul import bench_matmul

    with progress() as report:
        document = bench_matmul(hardware, lambda what: report(what, None))
    columns: list[_Column] = [
        ("dtype", lambda r: r["dtype"]),
        ("x[rows, D] . w[D, F]", lambda r: f"{r['rows']}, {r['d_model']}, {r['d_ff']}"),
        ("FLOP/s", lambda r: format_count(r["flops_per_second"])),
    ]
    _print(document, "Matmuls of one device, all at work", columns, as_json)


@command(app)
def train(
    plans: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PLAN.toml", help="Plans to time; without them, give a model."),
    ] = None,
    model: str | None = option(None, help="A preset, config.json, checkpoint folder or TOML.", unset="demo"),
    hardware: str | None = option(None, help="This machine: cpu:8, h100:8.", unset="cpu:8"),
    batch_tokens: int | None = option(
        None, parser=parse_count, help="Tokens of one step: 4096, 64k.", unset="4096"
    ),
    seq_len: int | None = option(
        None, parser=parse_length, help="Tokens of one sequence: 256, 4k.", unset="256"
    ),
    layouts: int | None = option(None, least=1, help="Number of layouts to time.", unset="4"),
    as_json: bool = JSON,
) -> None:
    """Time the training steps of plans, or of a model's fastest layouts.

    For a model, the fastest layout of each combination of axes is timed, such as data, fsdp and data with
    fsdp. The steps are the ones that mw train runs, with random weights and tokens, and take turns. The
    predicted times use the rates that mw calibrate measures.

    \b
    mw bench train
    mw bench train --model demo --hardware cpu:8 --batch-tokens 4096 --seq-len 256
    mw bench train plan.toml other.toml
    """
    options = {
        "--model": model, "--hardware": hardware, "--batch-tokens": batch_tokens, "--seq-len": seq_len,
        "--layouts": layouts,
    }  # fmt: skip
    if plans:
        refuse_with(options, "a plan already gives these")
        timed = _of_one_machine([load_plan(path) for path in plans])
    else:
        work = Train(batch_tokens or 4096, seq_len or 256)
        timed = fastest(model or "demo", hardware or "cpu:8", work, layouts or 4)
    use_devices_of(catalog.load(timed[0].hardware))
    from meshwright.bench.planned_steps import bench_training

    with progress() as report:
        document = bench_training(timed, lambda what: report(what, None))
    columns: list[_Column] = [
        ("layout", lambda r: r["layout"]),
        ("tokens/s", lambda r: format_count(r["tokens_per_second"])),
        ("spread", lambda r: f"{r['spread']:.0%}"),
    ]
    _print(document, f"Training steps on {document['hardware']}", columns, as_json)


def _of_one_machine(plans: list[Plan]) -> list[Plan]:
    """The plans, after checking that they train on the same hardware."""
    for plan in plans:
        if plan.workload.phase != "train":
            raise PlanError(f"{plan!r} does not train; mw bench serve --url times a server")
        if plan.hardware != plans[0].hardware:
            raise PlanError(
                f"one plan is for {plans[0].hardware} and one for {plan.hardware}; time them apart"
            )
    return plans


def fastest(model: str, hardware: str, work: Train, count: int) -> list[Plan]:
    """Plans with the fastest layout of each combination of axes: at most `count`, fastest first."""
    from meshwright.models.presets import load_model
    from meshwright.plan.chosen import plan_of
    from meshwright.plan.train import search

    config, machine = load_model(model), catalog.load(hardware)
    dtype = machine.chip.platform.dtype
    result = search(
        config,
        machine,
        work.workload(config),
        weights_dtype=dtype,
        compute_dtypes=(dtype,),
        runnable=True,
        num_ranked=_MOST_RANKED,
        explained=False,
    )
    by_axes: dict[tuple[str, ...], Plan] = {}
    for candidate in result.candidates:
        axes = tuple(axis for axis, degree in candidate.layout.mesh.sizes.items() if degree > 1)
        if candidate.fits and axes not in by_axes:
            by_axes[axes] = plan_of(config, machine, result.workload, candidate)
    if not by_axes:
        raise PlanError(f"{config.name} does not fit {hardware}; fits: a smaller --model or --batch-tokens")
    return list(by_axes.values())[:count]


@command(app)
def plan(
    repeats: int = option(3, least=1, help="Searches per case; the median is reported."),
    as_json: bool = JSON,
) -> None:
    """Time the planner's search for several models and machines.

    \b
    mw bench plan
    """
    with progress() as report:
        results = []
        for number, case in enumerate(_SEARCHES):
            report(f"{case[0]} on {case[1]}", number / len(_SEARCHES))
            results.append(_time_search(*case, repeats=repeats))
    columns: list[_Column] = [
        ("model", lambda r: r["model"]),
        ("hardware", lambda r: r["hardware"]),
        ("layouts", lambda r: f"{r['considered']:,}"),
        ("a layout", lambda r: format_seconds(r["seconds"] / r["considered"])),
    ]
    _print({"results": results}, "Searches", columns, as_json)


def _time_search(model: str, hardware: str, num_sequences: int, seq_len: int, *, repeats: int) -> dict:
    from meshwright.layout.workload import Workload
    from meshwright.models.presets import load_model
    from meshwright.plan.train import search

    config, machine, workload = load_model(model), catalog.load(hardware), Workload(num_sequences, seq_len)
    dtype = machine.chip.platform.dtype
    runs = [
        search(config, machine, workload, weights_dtype=dtype, compute_dtypes=(dtype,))
        for _ in range(repeats)
    ]
    # The time of a search has no prediction, so there is no ratio.
    seconds = {"seconds": median(run.seconds for run in runs), "predicted_seconds": None, "ratio": None}
    return {"model": model, "hardware": hardware, "considered": runs[0].considered, **seconds}


def _print(document: dict, title: str, columns: list[_Column], as_json: bool) -> None:
    if as_json:
        emit(document)
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    results = document["results"]
    columns = [*columns, ("measured", lambda r: format_seconds(r["seconds"]))]
    if any(result["ratio"] is not None for result in results):
        columns.append(("predicted", lambda r: format_seconds(r["predicted_seconds"])))
        columns.append(("measured / predicted", lambda r: f"{r['ratio']:.2f}"))
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading, _ in columns:
        table.add_column(heading)
    for result in results:
        table.add_row(*(cell(result) for _, cell in columns))
    show(table)
