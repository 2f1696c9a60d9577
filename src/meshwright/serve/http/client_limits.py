"""What a server takes of its clients: keys, rates, sizes, times, priorities. Needs no server package."""

import re
from dataclasses import dataclass, replace

from meshwright.errors import PlanError

# Scheme, host and port, as in a browser's Origin header: nothing follows them.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


@dataclass(frozen=True)
class ClientLimits:
    """max_body_bytes: of a request. api_keys: one of which each request must bring; none: open to all.

    requests_per_minute: of each key, or of each address where there are no keys; None: any rate.
    request_seconds: after which an answer is cut off with an error; None: never.
    stalled_seconds: after which a client that reads nothing is left. cors_origins: sites whose pages may ask.
    takes_priorities: whether a request may say that it goes before others.
    """

    max_body_bytes: int = 16_000_000
    api_keys: frozenset[str] = frozenset()
    requests_per_minute: float | None = None
    request_seconds: float | None = None
    stalled_seconds: float = 60.0
    cors_origins: tuple[str, ...] = ()
    takes_priorities: bool = False

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise PlanError(
                    f"CORS origin {origin!r} is not an address that browsers send; write "
                    "https://site.example, http://localhost:3000 or *, without a path"
                )

    def behind_front(self) -> "ClientLimits":
        """The limits of a server behind the front of several, which has checked who asks."""
        return replace(self, api_keys=frozenset(), requests_per_minute=None, cors_origins=())
