"""Hardware for the terminal: the shape of a machine, its roofs, and figures with their sources."""

from dataclasses import fields

from meshwright.dtypes import number_type
from meshwright.hardware.chip import (
    Chip,
    LinearCost,
    LinkEfficiency,
    SharedMemory,
    StepEfficiency,
    Switch,
    Torus,
)
from meshwright.hardware.network import Network
from meshwright.hardware.roofs import Roof, largest_machine, roofs
from meshwright.hardware.topology import Hardware
from meshwright.points import Points
from meshwright.units import format_bytes, format_number_of, format_seconds


def num_hosts(machine: Hardware) -> int:
    """The number of hosts. Slices and NVLink domains share none, and a last host may be partly full."""
    domains = machine.dims[0] if isinstance(machine.chip.network, Switch) else machine.num_slices
    return domains * -(-machine.num_chips // domains // machine.chip.chips_per_host)


def shape(machine: Hardware) -> str:
    """Two lines: the connections of the chips, and their total FLOP/s and memory."""
    chip, network, hosts = machine.chip, machine.chip.network, num_hosts(machine)
    if isinstance(network, Torus):
        joined = _torus_words(machine, network)
    elif isinstance(network, Switch):
        joined = f"{format_number_of(machine.dims[0], 'NVLink domain')} of {machine.dims[1]}"
    else:
        joined = "devices that share one memory"
    flops, memory = machine.num_chips * chip.flops("bf16"), machine.num_chips * chip.hbm_bytes
    return (
        f"{machine.spec}: {format_number_of(machine.num_chips, 'chip')} on "
        f"{format_number_of(hosts, 'host')}, {joined}\n"
        f"together {_flops(flops)} FLOP/s in bf16, {format_bytes(memory)} of device memory, "
        f"{format_bytes(hosts * chip.host_bytes)} on hosts"
    )


def _torus_words(machine: Hardware, torus: Torus) -> str:
    """The torus of a slice: its rings, and the reason that they are closed."""
    sizes = list(map(str, machine.dims))
    closed = [size for size, ring in zip(sizes, machine.wraparound, strict=True) if ring]
    which = (
        "every dimension is" if len(closed) == len(sizes) else f"{' and '.join(closed) or 'no dimension'} is"
    )
    if torus.wraparound_multiple_of:
        rule = f"rings close where every dimension is a multiple of {torus.wraparound_multiple_of}"
    else:
        rule = f"rings close along a dimension of {torus.wraparound_exactly}"
    slices = f"{format_number_of(machine.num_slices, 'slice')} of " if machine.num_slices > 1 else ""
    return f"{slices}{' x '.join(sizes)}; {which} a ring ({rule})"


def catalog_table(chips: list[Chip]) -> object:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("name", "kind", title="Figures of one chip", title_justify="left", box=SIMPLE_HEAD)
    headings = (
        "bf16 FLOP/s", "fp8 or int8", "memory", "memory/s", "FLOPs/B", "link/s, one way", "FLOPs/B", "joins",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for chip in chips:
        memory, *links = roofs(largest_machine(chip))
        link = links[0]
        narrow = [rate for dtype, rate in chip.flops_per_second.items() if number_type(dtype).bits == 8]
        table.add_row(
            chip.name,
            chip.kind,
            _flops(chip.flops("bf16")),
            _flops(max(narrow)) if narrow else "",
            format_bytes(chip.hbm_bytes),
            format_bytes(chip.hbm_bytes_per_second),
            _ratio(memory),
            format_bytes(link.one_way_bytes_per_second),
            _ratio(link),
            "x".join(map(str, largest_machine(chip).dims)),
        )
    table.caption = "mw hardware NAME shows the sources"
    return table


def networks_table(networks: list[Network]) -> object:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("network", "joins", title="Networks", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("latency", "in a step", "a chip, one way", "share of it", "falloff"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for network in networks:
        table.add_row(
            network.name,
            network.joins,
            format_seconds(network.hop_seconds),
            format_seconds(network.hop_seconds * network.step_latency),
            f"{format_bytes(network.bytes_per_second)}/s" if network.bytes_per_second else "its port",
            "the chip's" if network.share is None else f"{network.share:.0%}",
            f"{network.falloff:.3g}" if network.joins == "nodes" else "",
            network.about,
        )
    return table


def network_table(network: Network) -> object:
    """Every figure of a network with its source."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table("figure of the network", "value", "source", box=SIMPLE_HEAD)
    for key, value in vars(network).items():
        if key != "sources" and value not in (None, (), {}):
            table.add_row(key, _figure(key, value), Text(network.sources.get(key, "")))
    return table


_KINDS = {
    "hbm": "device memory",
    "ici": "ICI",
    "dcn": "DCN, between slices",
    "nvlink": "NVLink domain",
    "network": "network, between domains",
    "host": "all-gather on the host",
    "host_link": "host memory",
}


def roofs_table(machine: Hardware) -> object:
    """The bandwidths of a chip, and the FLOPs per byte above which they are not the limit."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("link", "joins", box=SIMPLE_HEAD, show_edge=False)
    for heading in ("one way", "all-gather", "bf16 FLOPs/byte"):
        table.add_column(heading, justify="right")
    for roof in roofs(machine):
        table.add_row(
            _KINDS[roof.kind] + (f", {len(roof.dims)} dimensions at once" if len(roof.dims) > 1 else ""),
            _joins(roof),
            f"{format_bytes(roof.one_way_bytes_per_second)}/s",
            f"{format_bytes(roof.bytes_per_second)}/s",
            _ratio(roof),
        )
    return table


def _joins(roof: Roof) -> str:
    if roof.size == 1:
        return ""
    line = (", ring" if roof.ring else ", line") if len(roof.dims) == 1 else ""
    return f"{roof.size:,}{line}"


def _ratio(roof: Roof) -> str:
    """FLOPs per byte in whole numbers."""
    return f"{roof.flops_per_byte:,.0f}"


def figures_table(chip: Chip) -> object:
    """Every figure of a chip with its source; ideal figures of the step are left out."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table("figure of one chip", "value", "source", box=SIMPLE_HEAD)
    for key in _FIGURES:
        if vars(chip)[key] not in (None, ()):
            table.add_row(key, _figure(key, vars(chip)[key]), Text(chip.sources.get(key, "")))
    rules = dict.fromkeys(
        ("wraparound_multiple_of", "wraparound_exactly"), chip.sources.get("wraparound", "")
    )
    groups = (
        ("flops_per_second", chip.flops_per_second, {}),
        ("network", _links(chip), {**chip.sources, **rules}),
        ("step", _not_ideal(chip.step), chip.step.sources),
        *([("compiler", {k: v for k, v in vars(chip.compiler).items() if v}, {})] if chip.compiler else []),
        *([("inference", _not_ideal(chip.inference), chip.inference.sources)] if chip.inference else []),
    )
    for name, values, sources in groups:
        table.add_row(name, "" if values else "ideal", Text(chip.sources.get(name, "")))
        for key, value in values.items():
            table.add_row(f"  {key}", _figure(key, value), Text(sources.get(key, "")))
    return table


_FIGURES = (
    "name", "aliases", "kind", "hbm_bytes", "hbm_usable_bytes", "hbm_bytes_per_second", "chips_per_host",
    "host_bytes", "host_link_bytes_per_second", "matrix_unit", "num_matrix_units", "compute_capability",
    "power_watts", "power_limit_watts", "price_per_chip_hour", "no_price", "gke_accelerator",
)  # fmt: skip


def _links(chip: Chip) -> dict[str, object]:
    """The figures of the network; on a host, the cost of each collective."""
    if isinstance(chip.network, SharedMemory):
        return dict(chip.network.costs)
    return {key: value for key, value in vars(chip.network).items() if value not in (None, {})}


def _not_ideal(step: StepEfficiency) -> dict[str, object]:
    ideal = StepEfficiency()
    names = [field.name for field in fields(step) if field.name != "sources"]
    return {name: vars(step)[name] for name in names if vars(step)[name] != vars(ideal)[name]}


def _figure(key: str, value: object) -> str:
    if isinstance(value, LinearCost):
        bandwidth = f"{format_bytes(value.bytes_per_second)}/s{_range(value.efficiency)}"
        return f"{format_seconds(value.latency_seconds)} + bytes / {bandwidth}"
    if isinstance(value, dict):
        if key == "efficiency":
            return _curves(value)
        return ", ".join(f"{name} {share:.4g}" for name, share in value.items())
    if isinstance(value, list | tuple):
        return ("x" if key == "pod" else ", ").join(map(str, value))
    if not isinstance(value, int | float):
        return str(value)
    if key.endswith("bytes_per_second"):
        return f"{format_bytes(value)}/s"
    if key.endswith("bytes"):
        return format_bytes(value)
    if key.endswith("seconds"):
        return format_seconds(value)
    if key.endswith("watts"):
        return f"{value:,.4g} W"
    return _flops(value) if abs(value) >= 10_000 else f"{value:.4g}"


def _curves(efficiency: LinkEfficiency) -> str:
    """The measured shares of the links' bandwidth, by collective and size."""
    curves = (f"{op} over {link}{_range(by_op[op])}" for link, by_op in efficiency.items() for op in by_op)
    return "; ".join(curves)


def _range(points: Points) -> str:
    """The shares of a bandwidth, from the smallest to the largest message."""
    ends = [f"{share:.0%} of it at {format_bytes(int(size))}" for size, share in (points[:1] + points[-1:])]
    return f", {' to '.join(ends)}" if points else ""


def _flops(value: float) -> str:
    """FLOP/s in three digits: `96G`, `459T`, `2.31P`, `1.88E`."""
    for factor, suffix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G")):
        if value >= factor:
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.3g}"
