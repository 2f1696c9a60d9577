"""Limits of a server's clients: keys, rates, sizes, times, priorities. Needs no server package."""

import os
import re
import stat
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Literal

from meshwright.errors import MeshwrightError, PlanError
from meshwright.files import read_text
from meshwright.options import option
from meshwright.units import parse_count

# Scheme, host and port, as in a browser's Origin header: nothing follows them.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


@dataclass(frozen=True)
class ClientLimits:
    """A server's limits on its clients.

    api_keys: accepted keys; without keys, every client is accepted. requests_per_minute, request_seconds:
    None for no limit. stalled_seconds: time after which a client that reads nothing is disconnected.
    wrong_keys_per_minute: tries of an address with a wrong key. refused_per_minute: a client's refused
    requests, less the accepted ones, after which its requests wait while others' are under way.
    """

    api_key_file: Path | None = option(
        None,
        help="A file of keys, one per line; clients must send one of them. Other users must not read it.",
        after="tensor",
    )
    api_keys: frozenset[str] = option(
        frozenset(),
        flag="--api-key",
        env="MESHWRIGHT_API_KEYS",
        help="The same, but other users see the option in the list of processes; repeatable.",
    )
    requests_per_minute: float | None = option(
        None, least=1, help="Rate limit per key, or per address without keys."
    )
    request_seconds: float | None = option(None, least=0.1, help="Cut off answers that take longer.")
    max_connections: int | None = option(
        None, least=1, help="Open connections of all clients.", unset="8192, or the process's limit"
    )
    max_connections_per_address: int | None = option(
        None, least=1, help="Open connections of one address.", unset="half of all"
    )
    trusted_proxies: tuple[str, ...] = option(
        (),
        flag="--trusted-proxy",
        help="An address or network whose X-Forwarded-For names the client; repeatable.",
        unset="none is believed",
    )
    max_body_bytes: int = option(16_000_000, parser=parse_count, help="Largest request body in bytes: 16M.")
    cors_origins: tuple[str, ...] = option(
        (), flag="--cors-origin", help="A site whose pages may send requests, or *; repeatable.", unset="none"
    )
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs",
        help="Answer requests in the order of arrival, or by their field priority, the lowest first.",
        after="mode",
    )
    stalled_seconds: float = 60.0
    wrong_keys_per_minute: int = 20
    refused_per_minute: int = 60

    def __post_init__(self) -> None:
        if self.api_key_file is not None:
            object.__setattr__(self, "api_keys", self.api_keys | _read_keys(self.api_key_file))
        _ = self.proxies
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise PlanError(
                    f"CORS origin {origin!r} is not an address that browsers send; write "
                    "https://site.example, http://localhost:3000 or *, without a path"
                )

    @property
    def proxies(self) -> list[IPv4Network | IPv6Network]:
        """The networks of `trusted_proxies`. Raises PlanError for one that is none."""
        try:
            return [ip_network(text) for text in self.trusted_proxies]
        except ValueError as error:
            raise PlanError(f"--trusted-proxy: {error}; write 10.0.0.7 or 10.0.0.0/24") from None

    @property
    def takes_priorities(self) -> bool:
        """Whether requests may have priorities."""
        return self.scheduling_policy == "priority"

    def behind_front(self) -> "ClientLimits":
        """The limits of one of several servers: their front has checked the client."""
        return replace(
            self, api_keys=frozenset(), api_key_file=None, requests_per_minute=None, cors_origins=()
        )


def _read_keys(path: Path) -> frozenset[str]:
    """The keys of a file. Raises MeshwrightError if it has none, or if other users can read it."""
    keys = frozenset(line.strip() for line in read_text(path, MeshwrightError).splitlines() if line.strip())
    if not keys:  # without keys the server would be open to all
        raise MeshwrightError(f"--api-key-file {path}: has no key; write one per line")
    if os.name == "posix" and path.stat().st_mode & stat.S_IROTH:
        raise MeshwrightError(f"--api-key-file {path}: other users can read it; run chmod o-r {path}")
    return keys
