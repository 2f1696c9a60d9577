"""Chips as TOML, every figure checked.

A catalog file, a user's own chip and a measured machine.toml have one form. Top-level keys are the
fields of Chip. [flops_per_second] is by dtype. [network] holds the fields of Torus or Switch, or one
[network.<collective>] table each with latency_seconds, bytes_per_second and, if the bandwidth depends on the
size, efficiency = [[bytes, share], ...]. Links have the same points in [network.efficiency.<link>], as
all_gather = [[bytes, share], ...], and between NVLink domains also by their number, in
[network.by_nodes] all_gather = [[domains, share], ...]. `between`, and `within` a TPU slice, name records in
networks/; a figure of a network that the file does not state is its record's. [matmul_rates] and
[memory_rates] list measured rates by size for each dtype: f32 = [[flops, flops_per_second], ...]. [step] has
the shares of the ratings that a training step reaches (StepEfficiency). A missing key of it is ideal. A
file without a [step] takes the [step] of the catalog's chip named by `step_from`; without this too, a user's
file takes the nearest chip's (catalog.load). [inference] has the same keys, for prefill and generate.
`shares = "gpu"` names a file of shares/ with both tables; the chip's file then states only what differs.
[compiler] describes the chip to its compiler (CompilerTarget). [sources] and [step.sources] give the source
of each figure. `devices = "cpu:8"` in a machine.toml is its topology. `per_core = true`: the figures are of
one host core. A GPU without [network] is one card.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import inf
from typing import Any, NamedTuple

from meshwright.checked_toml import CheckedToml
from meshwright.dtypes import KNOWN
from meshwright.errors import nearest
from meshwright.files import parse_toml
from meshwright.hardware.chip import (
    COLLECTIVES,
    Chip,
    CompilerTarget,
    LinearCost,
    LinkEfficiency,
    SharedMemory,
    StepEfficiency,
    Switch,
    Torus,
)
from meshwright.hardware.links import LINK_FIELDS
from meshwright.hardware.network import NETWORKS, Network
from meshwright.platforms import PLATFORMS
from meshwright.points import Points
from meshwright.records import Curves, read_fields

_FIGURES = ("hbm_bytes_per_second", "host_link_bytes_per_second")
_COUNTS = ("chips_per_host", "hbm_bytes", "host_bytes")
_OPTIONAL = ("power_watts", "power_limit_watts", "price_per_chip_hour", "compute_capability")
_OPTIONAL_COUNTS = ("hbm_usable_bytes", "matrix_unit", "num_matrix_units", "cores_in_cloud_names")
_OTHER = (
    "name", "aliases", "kind", "devices", "per_core", "flops_per_second", "matmul_rates", "memory_rates",
    "machines", "network", "shares", "step", "step_from", "inference", "currency", "sources", "compiler",
    "gke_accelerator", "no_price",
)  # fmt: skip
_TORUS = ("one_way_bytes_per_second", "hop_seconds", "dcn_bytes_per_second", "dcn_hop_seconds")
_WRAPAROUND = ("wraparound_multiple_of", "wraparound_exactly")
_SWITCH = (
    "nvlink_bytes_per_second",
    "nvlink_hop_seconds",
    "nic_bytes_per_second",
    "nic_hop_seconds",
    "collective_launch_seconds",
)
_LINEAR_COST = ("latency_seconds", "bytes_per_second")
_COMPILER_COUNTS = (
    "cores", "fp32_units", "shared_bytes", "l2_bytes", "memory_bytes", "memory_bytes_per_second",
)  # fmt: skip
# Keys of [network] that name a record.
_IN_TORUS, _IN_SWITCH = ("within", "between"), ("between",)


@dataclass(frozen=True)
class Description:
    """A chip as its file describes it.

    devices: the topology that the file names, or None. per_core: whether its figures are of one core.
    has_step: whether the file has a [step], even an empty one. step_from: the chip whose [step] it takes.
    has_links: whether the file has a [network]; without, it describes one card.
    """

    chip: Chip
    devices: str | None
    per_core: bool
    has_step: bool
    step_from: str | None
    has_links: bool


def read_chip(text: str, origin: str) -> Description:
    """The chip that TOML `text` describes.

    Raises HardwareError naming the file, the line and the key of a figure that is missing, not
    positive, or unknown.
    """
    file = CheckedToml(origin, text)
    data = file.parse()
    file.refuse_unknown(data, (*_FIGURES, *_COUNTS, *_OPTIONAL, *_OPTIONAL_COUNTS, *_OTHER))
    per_core = data.get("per_core", False)
    if per_core is not True and per_core is not False:
        raise file.error("per_core", f"is {per_core!r}, not true or false")
    if per_core:
        data = {"hbm_bytes": host_memory_bytes(), "host_bytes": host_memory_bytes()} | data
    if "shares" in data:
        data = _with_shares(file, data)
    has_links = "network" in data
    data = data if has_links else _one_card(data)
    named = tuple(_named(file, data))
    data = _with_networks(data, named)
    file.require(data, _needed(data))
    counts = {key: file.count(data, key) for key in _COUNTS}
    chip = Chip(
        name=file.string(data, "name"),
        kind=_kind(file, data),
        flops_per_second=_flops(file, data),
        hbm_bytes=counts["hbm_bytes"],
        host_bytes=counts["host_bytes"],
        chips_per_host=counts["chips_per_host"],
        compiler=_compiler(file, data) if "compiler" in data else None,
        gke_accelerator=file.string(data, "gke_accelerator") if "gke_accelerator" in data else None,
        no_price=file.string(data, "no_price") if "no_price" in data else None,
        network=_network(file, data),
        aliases=_aliases(file, data),
        machines=_machines(file, data),
        matmul_rates=_rates(file, data, "matmul_rates"),
        memory_rates=_rates(file, data, "memory_rates"),
        step=_of_networks(_step(file, data, "step"), data, named),
        inference=_step(file, data, "inference") if "inference" in data else None,
        sources=file.strings(data, "sources"),
        **{key: file.figure(data, key) for key in _FIGURES},
        **{key: file.figure(data, key) for key in _OPTIONAL if key in data},
        currency=_currency(file, data) if "currency" in data else "USD",
        **{key: file.count(data, key) for key in _OPTIONAL_COUNTS if key in data},
    )
    devices, step_from = (file.string(data, key) if key in data else None for key in ("devices", "step_from"))
    if step_from and "step" in data:
        raise file.error("step_from", f"= {step_from!r} next to a [step]; leave one of them out")
    return Description(chip, devices, per_core, "step" in data, step_from, has_links)


@cache
def _shares() -> dict[str, dict[str, Any]]:
    """The tables of each file in shares/, by the file's name."""
    files = (resources.files("meshwright.hardware") / "shares").iterdir()
    return {path.name.removesuffix(".toml"): parse_toml(path.read_text(encoding="utf-8")) for path in files}


def _with_shares(file: CheckedToml, data: Mapping[str, Any]) -> dict[str, Any]:
    """A chip's tables; figures that it does not state are from the file named by its `shares`."""
    name = file.string(data, "shares")
    if name not in _shares():
        raise file.error("shares", f"= {name!r} is unknown; {nearest(name, list(_shares()))}")
    return _filled(_shares()[name], data)


def _filled(given: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """`stated` with the entries of `given` that it lacks; tables in both are filled in the same way."""
    both = {key: (given[key], value) for key, value in stated.items() if key in given}
    tables = {key: pair for key, pair in both.items() if all(isinstance(side, Mapping) for side in pair)}
    return {**given, **stated, **{key: _filled(*pair) for key, pair in tables.items()}}


def _one_card(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tables with links for a card without any: those of its host, which one card never uses."""
    kind, rate = data.get("kind"), data.get("host_link_bytes_per_second")
    platform = PLATFORMS.get(kind) if isinstance(kind, str) else None
    if platform is None or platform.network != "switch" or rate is None:
        return data  # `file.require` names what lacks
    stated = {"nvlink_bytes_per_second": rate, "nic_bytes_per_second": rate}
    no_time = dict.fromkeys(("nvlink_hop_seconds", "nic_hop_seconds", "collective_launch_seconds"), 1e-6)
    return {**data, "network": {"domain_size": 1, **stated, **no_time}}


def _named(file: CheckedToml, data: Mapping[str, Any]) -> Iterator[Network]:
    """The networks that a file's [network] names."""
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in PLATFORMS or not isinstance(data.get("network"), Mapping):
        return  # the readers of both name the fault
    table, links = data["network"], PLATFORMS[kind].links
    for key in _FORMS[PLATFORMS[kind].network].named:
        if key in table:
            name = file.string(table, key, "network.")
            if name not in NETWORKS:
                known = [other for other in NETWORKS.names if NETWORKS[other].link in links]
                raise file.error(f"network.{key}", f"= {name!r} is unknown; {nearest(name, known)}")
            if NETWORKS[name].link not in links:
                raise file.error(f"network.{key}", f"= {name!r} joins {NETWORKS[name].joins}")
            yield NETWORKS[name]


def _with_networks(data: Mapping[str, Any], networks: tuple[Network, ...]) -> dict[str, Any]:
    """A file's tables with the figures of its networks, if it does not state them."""
    filled = dict(data)
    for record in networks:
        rate, hop = LINK_FIELDS[record.link]
        figures: dict[str, Any] = {hop: record.hop_seconds}
        sources = {hop: record.sources["hop_seconds"]}
        if record.bytes_per_second is not None:
            figures[rate] = record.bytes_per_second
            sources[rate] = record.sources["bytes_per_second"]
        if record.by_nodes:
            figures["by_nodes"] = _lists(record.by_nodes)
        table = {**figures, **filled["network"]}
        if record.by_size:
            table["efficiency"] = {record.link: _lists(record.by_size), **table.get("efficiency", {})}
        filled |= {"network": table, "sources": {**sources, **filled.get("sources", {})}}
    return filled


def _lists(curves: Curves) -> dict[str, list[list[float]]]:
    return {op: [list(point) for point in points] for op, points in curves.items()}


def _of_networks(
    step: StepEfficiency, data: Mapping[str, Any], networks: tuple[Network, ...]
) -> StepEfficiency:
    """The file's [step] with the figures of its networks that it does not state."""
    if "step" not in data:
        return step
    stated = {*data["step"], *(f"links.{link}" for link in step.links)}
    for record in networks:
        step = record.applied(step, stated)
    return step


def _needed(data: Mapping[str, Any]) -> list[str]:
    """The keys that a chip's file must have; in [network] they depend on the kind of chip."""
    needed = ["name", "kind", "flops_per_second", *_COUNTS, *_FIGURES, "network"]
    if not isinstance(data.get("network"), Mapping):
        return needed
    kind = data.get("kind")
    platform = PLATFORMS.get(kind) if isinstance(kind, str) else None  # `_kind` names the fault
    inner = _FORMS[platform.network].needed if platform else ()
    return needed + [f"network.{key}" for key in inner]


def _kind(file: CheckedToml, data: Mapping[str, Any]) -> str:
    kind = file.string(data, "kind")
    if kind not in PLATFORMS:
        *others, last = PLATFORMS
        raise file.error("kind", f"is {kind!r}; it is {', '.join(others)} or {last}")
    return kind


def _currency(file: CheckedToml, data: Mapping[str, Any]) -> str:
    currency = file.string(data, "currency")
    if len(currency) != 3 or not currency.isalpha() or not currency.isupper():
        raise file.error("currency", f"is {currency!r}, not three letters such as USD")
    return currency


def _aliases(file: CheckedToml, data: Mapping[str, Any]) -> tuple[str, ...]:
    aliases = data.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise file.error("aliases", f'is {aliases!r}, not a list of names such as ["v4"]')
    return tuple(aliases)


def _machines(file: CheckedToml, data: Mapping[str, Any]) -> dict[str, int]:
    if "machines" not in data:
        return {}
    table = file.table(data, "machines")
    return {name: file.count(table, name, "machines.") for name in table}


def _flops(file: CheckedToml, data: Mapping[str, Any]) -> dict[str, float]:
    table, prefix = file.table(data, "flops_per_second"), "flops_per_second."
    file.refuse_unknown(table, KNOWN, prefix)
    if not table:
        raise file.error("flops_per_second", "is empty: give the figure of one dtype at least")
    return {dtype: file.figure(table, dtype, prefix) for dtype in table}


def _step(file: CheckedToml, data: Mapping[str, Any], name: str) -> StepEfficiency:
    """The table `name`, [step] or [inference]."""
    if name not in data:
        return StepEfficiency()
    table, links = file.table(data, name), PLATFORMS[_kind(file, data)].links
    return StepEfficiency(**read_fields(StepEfficiency, file, table, f"{name}.", links=links))


def _rates(file: CheckedToml, data: Mapping[str, Any], key: str) -> dict[str, Points]:
    if key not in data:
        return {}
    table = file.table(data, key)
    file.refuse_unknown(table, KNOWN, f"{key}.")
    return {dtype: file.points(table, dtype, f"{key}.", most=inf) for dtype in table}


def _network(file: CheckedToml, data: Mapping[str, Any]) -> Torus | Switch | SharedMemory:
    return _FORMS[PLATFORMS[_kind(file, data)].network].read(file, file.table(data, "network"))


def _torus(file: CheckedToml, table: Mapping[str, Any]) -> Torus:
    file.refuse_unknown(table, ("pod", *_TORUS, *_WRAPAROUND, "efficiency", *_IN_TORUS), "network.")
    if "pod" not in table:
        raise file.missing("network.pod")
    pod = table["pod"]
    if not isinstance(pod, list) or not pod or not all(type(size) is int and size > 0 for size in pod):
        raise file.error("network.pod", f"is {pod!r}, not a list of sizes such as [16, 16]")
    rules = {key: file.count(table, key, "network.") for key in _WRAPAROUND if key in table}
    if len(rules) != 1:
        raise file.error("network", f"has {len(rules)} of {' and '.join(_WRAPAROUND)}; give one")
    figures = {key: file.figure(table, key, "network.") for key in _TORUS}
    efficiency = _efficiency(file, table, ("ici", "dcn"))
    within, between = (table.get(key) for key in _IN_TORUS)
    return Torus(pod=tuple(pod), **figures, **rules, efficiency=efficiency, within=within, between=between)


def _switch(file: CheckedToml, table: Mapping[str, Any]) -> Switch:
    file.refuse_unknown(table, ("domain_size", *_SWITCH, "efficiency", "by_nodes", *_IN_SWITCH), "network.")
    figures = {key: file.figure(table, key, "network.") for key in _SWITCH}
    domain_size = file.count(table, "domain_size", "network.")
    by_nodes: dict[str, Points] = {}
    if "by_nodes" in table:
        curves, prefix = file.table(table, "by_nodes", "network."), "network.by_nodes."
        file.refuse_unknown(curves, COLLECTIVES, prefix)
        by_nodes = {op: file.points(curves, op, prefix) for op in curves}
    efficiency = _efficiency(file, table, ("nvlink", "network"))
    between = table.get("between")
    return Switch(domain_size, **figures, efficiency=efficiency, by_nodes=by_nodes, between=between)


def _efficiency(file: CheckedToml, network: Mapping[str, Any], links: tuple[str, ...]) -> LinkEfficiency:
    if "efficiency" not in network:
        return {}
    table, prefix = file.table(network, "efficiency", "network."), "network.efficiency."
    file.refuse_unknown(table, links, prefix)
    by_link: dict[str, dict[str, Points]] = {}
    for link in table:
        curves = file.table(table, link, prefix)
        file.refuse_unknown(curves, COLLECTIVES, f"{prefix}{link}.")
        by_link[link] = {op: file.points(curves, op, f"{prefix}{link}.") for op in curves}
    return by_link


def _shared_memory(file: CheckedToml, network: Mapping[str, Any]) -> SharedMemory:
    file.refuse_unknown(network, COLLECTIVES, "network.")
    costs: dict[str, LinearCost] = {}
    for op in COLLECTIVES:
        table, prefix = file.table(network, op, "network."), f"network.{op}."
        file.refuse_unknown(table, (*_LINEAR_COST, "efficiency"), prefix)
        costs[op] = LinearCost(
            file.figure(table, "latency_seconds", prefix),
            file.figure(table, "bytes_per_second", prefix),
            file.points(table, "efficiency", prefix) if "efficiency" in table else (),
        )
    return SharedMemory(costs)


class _Form(NamedTuple):
    """A form of network: the keys that it must have, the keys that name records, and its reader."""

    needed: tuple[str, ...]
    named: tuple[str, ...]
    read: Callable[[CheckedToml, Mapping[str, Any]], Torus | Switch | SharedMemory]


# By `Platform.network`.
_FORMS = {
    "torus": _Form(("pod", *_TORUS), _IN_TORUS, _torus),
    "switch": _Form(("domain_size", *_SWITCH), _IN_SWITCH, _switch),
    "host": _Form(tuple(f"{op}.{key}" for op in COLLECTIVES for key in _LINEAR_COST), (), _shared_memory),
}


def _compiler(file: CheckedToml, data: Mapping[str, Any]) -> CompilerTarget:
    """[compiler]: a name, and the figures of a GPU if one of them is given."""
    table, prefix = file.table(data, "compiler"), "compiler."
    file.refuse_unknown(table, ("name", "clock_ghz", *_COMPILER_COUNTS), prefix)
    name = file.string(table, "name", prefix)
    if len(table) == 1:
        return CompilerTarget(name)
    counts = {key: file.count(table, key, prefix) for key in _COMPILER_COUNTS}
    return CompilerTarget(name, clock_ghz=file.figure(table, "clock_ghz", prefix), **counts)


def host_memory_bytes() -> int:
    """Bytes of memory of this host, as the operating system counts them."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def share_cores(chip: Chip, num_devices: int) -> Chip:
    """One of `num_devices` virtual devices on a host whose cores each are `chip`.

    FLOPs, memory bandwidth and the bandwidth of collectives scale by os.cpu_count() / num_devices;
    memory is split evenly; latencies stay.
    """
    assert isinstance(chip.network, SharedMemory)
    cores = (os.cpu_count() or 1) / num_devices
    costs = {
        op: replace(c, bytes_per_second=c.bytes_per_second * cores) for op, c in chip.network.costs.items()
    }
    return replace(
        chip,
        flops_per_second={dtype: flops * cores for dtype, flops in chip.flops_per_second.items()},
        hbm_bytes=chip.hbm_bytes // num_devices,
        hbm_bytes_per_second=chip.hbm_bytes_per_second * cores,
        host_link_bytes_per_second=chip.host_link_bytes_per_second * cores,
        chips_per_host=num_devices,
        network=SharedMemory(costs),
    )
