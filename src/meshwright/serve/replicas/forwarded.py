"""What the front hands to a server, and the routes that its process knows."""

from dataclasses import dataclass

from meshwright.serve.replicas.routes import Beginning, Routing

# The router and whoever ends requests meet here: both are of the process that clients are answered from.
ROUTING = Routing()


@dataclass(frozen=True)
class Forwarded:
    """A client's request on its way to a server.

    name: of no other request. server: the only one that will do; None for any.
    """

    name: str
    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    beginning: Beginning = ()
    server: str | None = None
