"""What a server takes of its clients: keys, rates, sizes, times. Needs no package of the server."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ClientLimits:
    """max_body_bytes: of a request. api_keys: one of which each request must bring; none: open to all.

    requests_per_minute: of each key, or of each address where there are no keys; None: any rate.
    request_seconds: after which an answer is cut off with an error; None: never.
    stalled_seconds: after which a client that reads nothing is left. cors_origins: sites whose pages may ask.
    """

    max_body_bytes: int = 16_000_000
    api_keys: frozenset[str] = frozenset()
    requests_per_minute: float | None = None
    request_seconds: float | None = None
    stalled_seconds: float = 60.0
    cors_origins: tuple[str, ...] = ()

    def behind_front(self) -> "ClientLimits":
        """The limits of a server behind the front of several, which has checked who asks."""
        return replace(self, api_keys=frozenset(), requests_per_minute=None, cors_origins=())
