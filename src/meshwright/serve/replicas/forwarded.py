"""The request that the front forwards to a server, and the routes known to its process."""

from dataclasses import dataclass

from meshwright.serve.replicas.routes import Beginning, Routing

# The front and Ray's router share one table: both run in the process that answers clients.
ROUTING = Routing()


@dataclass(frozen=True)
class Forwarded:
    """A client's request on its way to a server.

    name: unique name of the request. server: the required server; None for any.
    """

    name: str
    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    beginning: Beginning = ()
    server: str | None = None
