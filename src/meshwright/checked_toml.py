"""A TOML text whose figures are checked as they are read; errors name file, line and key."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from meshwright.errors import HardwareError, nearest
from meshwright.files import parse_toml
from meshwright.points import Points, fault

_MAY_BE_ZERO = (
    "roofline", "overlap", "prefetch", "padding", "experts_seconds", "launch_seconds", "host_seconds",
    "host_collective_seconds",
    "host_node_seconds", "host_stage_seconds", "host_flush_seconds", "host_request_seconds",
    "host_step_seconds", "host_token_seconds", "request_seconds", "step_seconds",
    "direct_seconds", "prompt_layer_seconds", "attention_half_keys",
    "network_falloff", "falloff", "matmul_half_outputs", "kernel_seconds", "collective_seconds",
    "collective_launch_seconds",
    "hop_seconds", "nvlink_hop_seconds", "nic_hop_seconds", "dcn_hop_seconds", "latency_seconds",
)  # fmt: skip

# Meanings of figures that files may lack, each with an example to write there.
_MEANINGS = {
    "name": 'a string such as "mychip"',
    "kind": 'a string: "tpu", "gpu" or "cpu"',
    "devices": 'a string such as "v5e:4x4"',
    "flops_per_second": "a table of dense peaks by dtype, such as bf16 = 989e12",
    "hbm_bytes": "bytes of one chip's memory, such as 80e9",
    "hbm_bytes_per_second": "bytes a second of that memory, such as 3.35e12",
    "host_bytes": "bytes of the host's memory, such as 2e12",
    "host_link_bytes_per_second": "bytes a second between chip and host, one way, such as 64e9",
    "chips_per_host": "how many chips share a host, such as 8",
    "network": "a table of the links that leave the chip",
    "pod": "the largest torus, such as [16, 16]",
    "one_way_bytes_per_second": "bytes a second of one link in one direction, such as 45e9",
    "hop_seconds": "seconds of a message to the next chip, such as 1e-6",
    "dcn_bytes_per_second": "a chip's share of its host's network card, one way, such as 6.25e9",
    "dcn_hop_seconds": "seconds of a message between slices, such as 1e-5",
    "domain_size": "GPUs of one NVLink domain, such as 8",
    "nvlink_bytes_per_second": "bytes a second of one GPU, one way, such as 450e9",
    "nvlink_hop_seconds": "seconds of a message inside the domain, such as 1.9e-6",
    "nic_bytes_per_second": "bytes a second of a GPU's network card, one way, such as 50e9",
    "nic_hop_seconds": "seconds of a message between domains, such as 4e-6",
    "collective_launch_seconds": "fixed seconds of one collective, such as 1e-5",
    "latency_seconds": "seconds of the smallest message, such as 2e-4",
    "bytes_per_second": "bytes a second of the largest messages, such as 5e9",
    "cores": "multiprocessors of the GPU, such as 132",
    "fp32_units": "float32 units of one core, such as 128",
    "shared_bytes": "shared memory of one core, such as 233_472",
    "clock_ghz": "the clock that it boosts to, such as 1.98",
    "l2_bytes": "bytes of the L2 cache, such as 52_428_800",
    "memory_bytes": "bytes of memory as the driver counts them, such as 84_942_979_072",
    "memory_bytes_per_second": "bytes a second of that memory, such as 3_352_320_000_000",
}


@dataclass(frozen=True)
class CheckedToml:
    """A TOML text and its origin. Errors write keys as `table.key`."""

    origin: str
    text: str

    def parse(self) -> dict[str, Any]:
        """The text as a table. Raises HardwareError naming the line that is not TOML."""
        try:
            return parse_toml(self.text)
        except ValueError as error:
            what, _, line = str(error).removesuffix(")").partition(" (at line ")
            where = f"{self.origin}:{line.split(',')[0]}" if line else self.origin
            raise HardwareError(f"{where}: not TOML: {what[:1].lower()}{what[1:]}") from error

    def error(self, key: str, what: str) -> HardwareError:
        return HardwareError(f"{self.origin}:{self._line(key)}: {key} {what}")

    def _line(self, key: str) -> int:
        """The line that sets `key`; if none does, its table's line, or 1 at the top."""
        table = ""
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := re.match(r"\s*\[([^\[\]]+)\]", line):
                table = f"{_plain(header[1])}."
                if table[:-1] == key:
                    return number
            elif (entry := re.match(r"""\s*([\w.\s"'-]+?)\s*=""", line)) and table + _plain(entry[1]) == key:
                return number
        return self._line(key.rpartition(".")[0]) if key else 1

    def missing(self, key: str) -> HardwareError:
        """The error for a missing `key`, with its meaning if that is known."""
        meaning = _MEANINGS.get(key.rpartition(".")[2])
        return self.error(key, f"is missing: {meaning}" if meaning else "is missing")

    def require(self, data: Mapping[str, Any], keys: Iterable[str]) -> None:
        """Raises HardwareError naming all of `keys`, written `table.key`, if `data` lacks several.

        A single missing key may be misspelt, which the reader of its table reports.
        """
        missing = list(dict.fromkeys(filter(None, (_missing(data, key) for key in keys))))
        if len(missing) > 1:
            raise HardwareError(
                f"{self.origin} lacks {', '.join(missing)}; mw hardware --template h100 prints a whole file"
            )

    def figure(self, table: Mapping[str, Any], key: str, prefix: str = "", most: float = inf) -> float:
        """The number at `key`: finite, above 0 (a latency or an overlap may be 0) and at most `most`."""
        name = prefix + key
        if key not in table:
            raise self.missing(name)
        value = table[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"is {value!r}, not a number")
        least = "0 or more" if key in _MAY_BE_ZERO else "above 0"
        if not isfinite(value) or value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
            raise self.error(name, f"= {value} must be {least}{'' if value <= 0 else ' and finite'}")
        if value > most:
            raise self.error(name, f"= {value} must be at most {most:g}")
        return value

    def count(self, table: Mapping[str, Any], key: str, prefix: str = "") -> int:
        """The whole number at `key`, above 0."""
        value = self.figure(table, key, prefix)
        if value != int(value):
            raise self.error(prefix + key, f"= {value} must be a whole number")
        return int(value)

    def points(self, table: Mapping[str, Any], key: str, prefix: str, most: float = 1.0) -> Points:
        """The points [[bytes, share], ...] at `key`; with most = inf [[size, rate], ...]."""
        rows = table[key]
        if not isinstance(rows, list) or not all(_is_pair(row) for row in rows):
            raise self.error(prefix + key, f"is {rows!r}, not points such as [[65536, 0.5], [1048576, 1.0]]")
        if wrong := fault(rows, most):
            raise self.error(prefix + key, wrong)
        return tuple((float(num_bytes), float(share)) for num_bytes, share in rows)

    def table(self, parent: Mapping[str, Any], key: str, prefix: str = "") -> dict[str, Any]:
        """The table at `key`."""
        if key not in parent:
            raise self.missing(prefix + key)
        if not isinstance(parent[key], dict):
            raise self.error(prefix + key, f"is {parent[key]!r}, not a table: [{prefix}{key}]")
        return parent[key]

    def string(self, parent: Mapping[str, Any], key: str, prefix: str = "") -> str:
        """The string at `key`."""
        if key not in parent:
            raise self.missing(prefix + key)
        if not isinstance(parent[key], str):
            raise self.error(prefix + key, f"is {parent[key]!r}, not a string")
        return parent[key]

    def strings(self, parent: Mapping[str, Any], key: str, prefix: str = "") -> dict[str, str]:
        """The table of strings at `key`; an empty one if there is no such table."""
        table = self.table(parent, key, prefix) if key in parent else {}
        return {inner: self.string(table, inner, f"{prefix}{key}.") for inner in table}

    def refuse_unknown(self, table: Mapping[str, Any], known: tuple[str, ...], prefix: str = "") -> None:
        """Raises HardwareError for a key that is not `known`, naming the nearest that is."""
        for key in table:
            if key not in known:
                raise self.error(prefix + key, f"is unknown; {nearest(key, list(known))}")


def _missing(data: object, key: str, above: str = "") -> str | None:
    """The first missing part of `table.key`; None if all of it exists."""
    first, _, rest = key.partition(".")
    if not isinstance(data, Mapping):
        return None  # the reader of the table reports a value in its place
    if first not in data:
        return above + first
    return _missing(data[first], rest, f"{above}{first}.") if rest else None


def _plain(key: str) -> str:
    """A TOML key without its quotes and spaces: `network . "pod"` is network.pod."""
    return re.sub(r"""[\s"']""", "", key)


def _is_pair(row: object) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 2
        and all(isinstance(x, int | float) and not isinstance(x, bool) and isfinite(x) for x in row)
    )
