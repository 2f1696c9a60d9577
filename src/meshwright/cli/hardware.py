"""mw hardware: the catalog, and one machine with the sources of its figures."""

from typing import Annotated

import typer

from meshwright.cli.common import Json, emit, show
from meshwright.hardware import catalog
from meshwright.hardware.chip import Chip, SharedMemory
from meshwright.hardware.efficiency import Points
from meshwright.hardware.topology import Hardware
from meshwright.units import format_bytes, format_count, format_seconds

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def hardware(
    name: Annotated[
        str | None, typer.Argument(help="A chip (v5p), a machine (v5p:4x4x8) or a .toml.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the known chips, or show one with the source of each figure.

    \b
    mw hardware
    mw hardware v5p:16x20x28
    """
    if name is None:
        documents = [chip_document(catalog.chip(known)) for known in catalog.names()]
        if as_json:
            emit({"hardware": documents})
        else:
            show(_catalog_table(documents))
        return
    document = _one(name)
    if as_json:
        emit(document)
    else:
        show(detail_table(document))


def chip_document(chip: Chip) -> dict:
    """The figures of one chip, per chip, with their sources."""
    network = chip.network
    links = (
        {op: vars(cost) for op, cost in network.costs.items()}
        if isinstance(network, SharedMemory)
        else vars(network)
    )
    return {
        "name": chip.name,
        "kind": chip.kind,
        "flops_per_second": dict(chip.flops_per_second),
        "hbm_bytes": chip.hbm_bytes,
        "hbm_bytes_per_second": chip.hbm_bytes_per_second,
        "link_bytes_per_second": chip.link_bytes_per_second,
        "chips_per_host": chip.chips_per_host,
        "host_bytes": chip.host_bytes,
        "host_link_bytes_per_second": chip.host_link_bytes_per_second,
        "power_watts": chip.power_watts,
        "price_per_chip_hour": chip.price_per_chip_hour,
        "step": {key: value for key, value in vars(chip.step).items() if key != "sources"},
        "network": {"kind": type(network).__name__, **links},
        "sources": dict(chip.sources),
    }


def hardware_document(machine: Hardware) -> dict:
    """One machine: its topology and its chip."""
    return {
        "spec": machine.spec,
        "num_chips": machine.num_chips,
        "num_slices": machine.num_slices,
        "dims": list(machine.dims),
        "wraparound": list(machine.wraparound),
        **chip_document(machine.chip),
    }


def _one(name: str) -> dict:
    if ":" in name or name.endswith(".toml"):
        return hardware_document(catalog.load(name))
    return chip_document(catalog.chip(name))


def _catalog_table(documents: list[dict]) -> object:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("name", "kind", title="Figures of one chip", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("bf16 FLOP/s", "memory", "memory/s", "link/s, one way"):
        table.add_column(heading, justify="right")
    for chip in documents:
        flops = chip["flops_per_second"].get("bf16") or max(chip["flops_per_second"].values())
        memory, link = chip["hbm_bytes_per_second"], chip["link_bytes_per_second"]
        figures = (format_flops(flops), *(format_bytes(value) for value in (chip["hbm_bytes"], memory, link)))
        table.add_row(chip["name"], chip["kind"], *figures)
    table.caption = "mw hardware NAME shows the sources"
    return table


def detail_table(document: dict) -> object:
    """Every figure of a chip or machine, with its source."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    sources = document["sources"]
    title = document.get("spec", document["name"])
    table = Table("figure", "value", "source", title=title, title_justify="left", box=SIMPLE_HEAD)
    for key, value in document.items():
        if key == "sources" or value is None:
            continue
        inner = value if isinstance(value, dict) else {}
        table.add_row(key, "" if inner else _figure(key, value), Text(sources.get(key, "")))
        for name, figure in inner.items():
            if figure is not None and figure != {}:
                table.add_row(f"  {name}", _inner_figure(name, figure), Text(sources.get(name, "")))
    return table


def _inner_figure(name: str, figure: object) -> str:
    if not isinstance(figure, dict):
        return _figure(name, figure)
    if name == "efficiency":
        curves = (f"{op} over {link}{_range(by_op[op])}" for link, by_op in figure.items() for op in by_op)
        return "; ".join(curves)
    latency, bandwidth = figure["latency_seconds"], figure["bytes_per_second"]
    return f"{format_seconds(latency)} + bytes / {format_bytes(bandwidth)}/s{_range(figure['efficiency'])}"


def _range(points: Points) -> str:
    """The shares of a bandwidth that messages reach, from the smallest to the largest size."""
    ends = [f"{share:.0%} of it at {format_bytes(int(size))}" for size, share in (points[:1] + points[-1:])]
    return f", {' to '.join(ends)}" if points else ""


def _figure(key: str, value: object) -> str:
    if isinstance(value, list | tuple):
        return ("x" if key in ("dims", "pod") else ", ").join(map(str, value)).lower()
    if not isinstance(value, int | float):
        return str(value)
    if key.endswith("bytes_per_second"):
        return f"{format_bytes(value)}/s"
    if key.endswith("bytes"):
        return format_bytes(value)
    return format_flops(value) if abs(value) >= 1000 else f"{value:.4g}"


def format_flops(value: float) -> str:
    """FLOP/s in three digits: `459T`, `2.31P`."""
    return f"{value / 1e15:.3g}P" if value >= 1e15 else format_count(value)
