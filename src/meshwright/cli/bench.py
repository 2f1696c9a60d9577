"""mw bench: what is measured here, beside what is predicted."""

from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import typer

from meshwright.cli.common import Json, LocalHardwareOption, emit, progress, show
from meshwright.cli.devices import use_devices_of
from meshwright.hardware import catalog
from meshwright.units import format_bytes, format_count, format_seconds

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_Column = tuple[str, Callable[[dict[str, Any]], str]]

# A plan of each size that people ask for: (model, hardware, sequences, sequence length).
_SEARCHES = (
    ("demo", "cpu:8", 32, 256),
    ("llama-3-8b", "v5e:16x16", 512, 4096),
    ("llama-3-70b", "h100:64x8", 1024, 8192),
    ("llama-3-70b", "v5p:16x20x28", 1024, 4096),
)


@app.callback()
def bench() -> None:
    """Measure collectives or matmuls of this machine, or the planner's search."""


@app.command()
def collectives(hardware: LocalHardwareOption = "cpu:8", as_json: Json = False) -> None:
    """Time every collective at several sizes and groups, beside the line fitted through them.

    \b
    mw bench collectives --hardware cpu:8
    """
    use_devices_of(catalog.load(hardware))
    from meshwright.bench.collectives import bench_collectives

    with progress() as report:
        document = bench_collectives(hardware, lambda what: report(what, None))
    columns: list[_Column] = [
        ("operation", lambda r: r["op"]),
        ("devices", lambda r: str(r["num_devices"])),
        ("V", lambda r: format_bytes(r["bytes"])),
    ]
    _print(document, "Collectives", columns, as_json)


@app.command()
def matmul(hardware: LocalHardwareOption = "cpu:8", as_json: Json = False) -> None:
    """Time matmuls of a Transformer's shapes on all devices at once, beside the mean rate.

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


@app.command()
def plan(
    repeats: Annotated[int, typer.Option(min=1, help="Searches of each; the median counts.")] = 3,
    as_json: Json = False,
) -> None:
    """Time the planner's search for models and machines of several sizes.

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
    from meshwright.models.presets import load_model
    from meshwright.plan.train import search
    from meshwright.plan_file import Workload

    config, machine, workload = load_model(model), catalog.load(hardware), Workload(num_sequences, seq_len)
    dtype = "f32" if machine.chip.kind == "cpu" else "bf16"
    found = [
        search(config, machine, workload, weights_dtype=dtype, compute_dtypes=(dtype,))
        for _ in range(repeats)
    ]
    # Nothing predicts the time of a search, so there is no ratio to give.
    seconds = {"seconds": median(one.seconds for one in found), "predicted_seconds": None, "ratio": None}
    return {"model": model, "hardware": hardware, "considered": found[0].considered, **seconds}


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
