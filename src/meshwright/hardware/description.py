"""Chips as TOML: read with every figure checked, and written back.

A catalog file and a measured machine.toml share one form. Top-level keys are the fields of Chip;
[flops_per_second] is by dtype; [network] holds the fields of Torus or Switch, or one
[network.<collective>] table each with latency_seconds, bytes_per_second and, where the bandwidth
depends on the size, efficiency = [[bytes, share], ...]. For links the same points stand under
[network.efficiency.<link>] as all_gather = [[bytes, share], ...]. [matmul_rates] and [memory_rates]
list measured rates by size for each dtype: f32 = [[flops, flops_per_second], ...]. [sources] says
where each figure comes from. `devices = "cpu:8"` in a machine.toml is its topology.
`per_core = true` says that the figures are those of one host core.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

from meshwright.errors import HardwareError, nearest
from meshwright.hardware.chip import (
    COLLECTIVES,
    Chip,
    LinearCost,
    LinkEfficiency,
    SharedMemory,
    Switch,
    Torus,
)
from meshwright.hardware.efficiency import Points, fault
from meshwright.units import DTYPE_BYTES

_FIGURES = (
    "hbm_bytes_per_second",
    "host_link_bytes_per_second",
    "matmul_efficiency",
    "overlap",
    "launch_seconds",
)
_COUNTS = ("chips_per_host", "hbm_bytes", "host_bytes")
_OTHER = (
    "name",
    "aliases",
    "kind",
    "devices",
    "per_core",
    "price_per_chip_hour",
    "flops_per_second",
    "memory_efficiency",
    "matmul_rates",
    "memory_rates",
    "network",
    "sources",
)
_TORUS = ("one_way_bytes_per_second", "hop_seconds", "dcn_bytes_per_second", "dcn_hop_seconds")
_WRAPAROUND = ("wraparound_multiple_of", "wraparound_exactly")
_SWITCH = (
    "nvlink_bytes_per_second",
    "nvlink_hop_seconds",
    "nic_bytes_per_second",
    "nic_hop_seconds",
    "collective_launch_seconds",
)
_MAY_BE_ZERO = ("overlap", "launch_seconds", "collective_launch_seconds", "hop_seconds", "latency_seconds")
_AT_MOST_ONE = ("overlap", "matmul_efficiency")


@dataclass(frozen=True)
class Description:
    """A chip, the topology its file names (or None), and whether its figures are those of one core."""

    chip: Chip
    devices: str | None
    per_core: bool


@dataclass(frozen=True)
class _File:
    origin: str
    text: str

    def error(self, key: str, what: str) -> HardwareError:
        line = self._line(key)
        where = f"{self.origin}:{line}" if line else self.origin
        return HardwareError(f"{where}: {key} {what}")

    def _line(self, key: str) -> int | None:
        """The line that sets `key`, written `table.key` inside a table; None if no line does."""
        table = ""
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := re.match(r"\s*\[([\w.-]+)\]", line):
                table = f"{header[1]}."
                if header[1] == key:
                    return number
            elif (entry := re.match(r"\s*([\w-]+)\s*=", line)) and table + entry[1] == key:
                return number
        return None

    def figure(self, table: Mapping[str, Any], key: str, prefix: str = "") -> float:
        """The number at `key`: finite and above 0 (not below, for a latency)."""
        name = prefix + key
        if key not in table:
            raise self.error(name, "is missing")
        value = table[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"is {value!r}, not a number")
        if not (0 <= value < float("inf")) or (value == 0 and key not in _MAY_BE_ZERO):
            raise self.error(name, f"= {value} must be {'0 or more' if key in _MAY_BE_ZERO else 'above 0'}")
        if key in _AT_MOST_ONE and value > 1:
            raise self.error(name, f"= {value} must be at most 1")
        return value

    def points(self, table: Mapping[str, Any], key: str, prefix: str, most: float = 1.0) -> Points:
        """The points [[bytes, share], ...] at `key`; with most = inf [[size, rate], ...]."""
        rows = table[key]
        if not isinstance(rows, list) or not all(_is_pair(row) for row in rows):
            raise self.error(prefix + key, f"is {rows!r}, not points such as [[65536, 0.5], [1048576, 1.0]]")
        if wrong := fault(rows, most):
            raise self.error(prefix + key, wrong)
        return tuple((float(num_bytes), float(share)) for num_bytes, share in rows)

    def count(self, table: Mapping[str, Any], key: str, prefix: str = "") -> int:
        value = self.figure(table, key, prefix)
        if value != int(value):
            raise self.error(prefix + key, f"= {value} must be a whole number")
        return int(value)

    def table(self, parent: Mapping[str, Any], key: str, prefix: str = "") -> dict[str, Any]:
        if not isinstance(parent.get(key), dict):
            raise self.error(prefix + key, "is missing: it is a table")
        return parent[key]

    def text_of(self, parent: Mapping[str, Any], key: str) -> str:
        if not isinstance(parent.get(key), str):
            raise self.error(key, "is missing: it is a string")
        return parent[key]

    def refuse_unknown(self, table: Mapping[str, Any], known: tuple[str, ...], prefix: str = "") -> None:
        for key in table:
            if key not in known:
                raise self.error(prefix + key, f"is unknown; {nearest(key, list(known))}")


def read_chip(text: str, origin: str) -> Description:
    """The chip that TOML `text` describes.

    Raises HardwareError naming the file, the line and the key of a figure that is missing, not
    positive, or unknown.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"{origin}: not TOML: {error}") from error
    file = _File(origin, text)
    file.refuse_unknown(data, _FIGURES + _COUNTS + _OTHER)
    per_core = data.get("per_core", False)
    if per_core is not True and per_core is not False:
        raise file.error("per_core", f"is {per_core!r}, not true or false")
    if per_core:
        data = {"hbm_bytes": host_memory_bytes(), "host_bytes": host_memory_bytes()} | data
    price = "price_per_chip_hour"
    figures = {key: file.figure(data, key) for key in _FIGURES}
    counts = {key: file.count(data, key) for key in _COUNTS}
    chip = Chip(
        name=file.text_of(data, "name"),
        kind=_kind(file, data),
        flops_per_second=_by_dtype(file, data, "flops_per_second"),
        hbm_bytes=counts["hbm_bytes"],
        hbm_bytes_per_second=figures["hbm_bytes_per_second"],
        host_bytes=counts["host_bytes"],
        host_link_bytes_per_second=figures["host_link_bytes_per_second"],
        chips_per_host=counts["chips_per_host"],
        matmul_efficiency=figures["matmul_efficiency"],
        overlap=figures["overlap"],
        launch_seconds=figures["launch_seconds"],
        network=_network(file, data),
        aliases=tuple(data.get("aliases", ())),
        price_per_chip_hour=file.figure(data, price) if price in data else None,
        memory_efficiency=_by_dtype(file, data, "memory_efficiency") if "memory_efficiency" in data else {},
        matmul_rates=_rates(file, data, "matmul_rates"),
        memory_rates=_rates(file, data, "memory_rates"),
        sources=file.table(data, "sources") if "sources" in data else {},
    )
    devices = file.text_of(data, "devices") if "devices" in data else None
    return Description(chip, devices, per_core)


def _kind(file: _File, data: Mapping[str, Any]) -> str:
    kind = file.text_of(data, "kind")
    if kind not in ("tpu", "gpu", "cpu"):
        raise file.error("kind", f"is {kind!r}; it is tpu, gpu or cpu")
    return kind


def _by_dtype(file: _File, data: Mapping[str, Any], key: str) -> dict[str, float]:
    table = file.table(data, key)
    file.refuse_unknown(table, tuple(DTYPE_BYTES), f"{key}.")
    if not table:
        raise file.error(key, "is empty: give the figure of one dtype at least")
    return {dtype: file.figure(table, dtype, f"{key}.") for dtype in table}


def _rates(file: _File, data: Mapping[str, Any], key: str) -> dict[str, Points]:
    if key not in data:
        return {}
    table = file.table(data, key)
    file.refuse_unknown(table, tuple(DTYPE_BYTES), f"{key}.")
    return {dtype: file.points(table, dtype, f"{key}.", most=inf) for dtype in table}


def _network(file: _File, data: Mapping[str, Any]) -> Torus | Switch | SharedMemory:
    read = {"tpu": _torus, "gpu": _switch, "cpu": _shared_memory}[_kind(file, data)]
    return read(file, file.table(data, "network"))


def _torus(file: _File, table: Mapping[str, Any]) -> Torus:
    file.refuse_unknown(table, ("pod", *_TORUS, *_WRAPAROUND, "efficiency"), "network.")
    pod = table.get("pod")
    if not isinstance(pod, list) or not pod or not all(isinstance(size, int) and size > 0 for size in pod):
        raise file.error("network.pod", f"is {pod!r}, not a list of sizes such as [16, 16]")
    rules = {key: file.count(table, key, "network.") for key in _WRAPAROUND if key in table}
    if len(rules) != 1:
        raise file.error("network", f"has {len(rules)} of {' and '.join(_WRAPAROUND)}; give one")
    figures = {key: file.figure(table, key, "network.") for key in _TORUS}
    return Torus(pod=tuple(pod), **figures, **rules, efficiency=_efficiency(file, table, ("ici", "dcn")))


def _switch(file: _File, table: Mapping[str, Any]) -> Switch:
    file.refuse_unknown(table, ("domain_size", *_SWITCH, "efficiency"), "network.")
    figures = {key: file.figure(table, key, "network.") for key in _SWITCH}
    domain_size = file.count(table, "domain_size", "network.")
    return Switch(domain_size, **figures, efficiency=_efficiency(file, table, ("nvlink", "network")))


def _efficiency(file: _File, network: Mapping[str, Any], links: tuple[str, ...]) -> LinkEfficiency:
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


def _shared_memory(file: _File, network: Mapping[str, Any]) -> SharedMemory:
    file.refuse_unknown(network, COLLECTIVES, "network.")
    costs: dict[str, LinearCost] = {}
    for op in COLLECTIVES:
        table, prefix = file.table(network, op, "network."), f"network.{op}."
        file.refuse_unknown(table, ("latency_seconds", "bytes_per_second", "efficiency"), prefix)
        costs[op] = LinearCost(
            file.figure(table, "latency_seconds", prefix),
            file.figure(table, "bytes_per_second", prefix),
            file.points(table, "efficiency", prefix) if "efficiency" in table else (),
        )
    return SharedMemory(costs)


def _is_pair(row: object) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 2
        and all(isinstance(x, int | float) and not isinstance(x, bool) and isfinite(x) for x in row)
    )


def host_memory_bytes() -> int:
    """Bytes of memory of this host, as the operating system counts them."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def share_cores(chip: Chip, num_devices: int) -> Chip:
    """What one of `num_devices` virtual devices gets of a host whose cores each are `chip`.

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
