"""Physical links, and which of them each mesh axis takes."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import Literal

from meshwright.hardware.chip import SharedMemory, Switch, Torus
from meshwright.hardware.fold import Shares, foldings

LinkKind = Literal["ici", "dcn", "nvlink", "network", "host"]


@dataclass(frozen=True)
class Link:
    """A stretch of physical links that a mesh axis takes.

    kind: `ici` joins TPU chips, `dcn` TPU slices, `nvlink` the GPUs of a domain, `network` the
    domains, `host` the virtual devices of one host. size: devices along it.
    one_way_bytes_per_second: of one device in one direction.
    dim, stride, ring: its place on a torus (see fold.Share); unused on a switch.
    two_way: whether a ring is used in both directions at once.
    """

    kind: LinkKind
    size: int
    one_way_bytes_per_second: float
    hop_seconds: float
    dim: int = 0
    stride: int = 1
    ring: bool = False
    two_way: bool = True

    @property
    def is_outer(self) -> bool:
        """Whether the link joins slices or NVLink domains rather than the chips inside one."""
        return self.kind in ("dcn", "network")

    def __str__(self) -> str:
        """The number of devices along the link, and its place.

        >>> print(Link("ici", 4, 9e10, 1e-6, dim=1, ring=True), Link("nvlink", 8, 4.5e11, 2e-6), sep="; ")
        4 on ici dimension 1 (ring); 8 on nvlink
        """
        if self.kind != "ici":
            return f"{self.size} on {self.kind}"
        every = f", every {self.stride}th chip" if self.stride > 1 else ""
        return f"{self.size} on ici dimension {self.dim}{every}{' (ring)' if self.ring else ''}"


Interconnect = Torus | Switch | SharedMemory
# The links of every mesh axis, in the order of the axes.
AxisLinks = tuple[tuple[Link, ...], ...]


# The fields of a Torus or Switch that hold the bandwidth and the latency of each kind of link.
LINK_FIELDS: dict[LinkKind, tuple[str, str]] = {
    "ici": ("one_way_bytes_per_second", "hop_seconds"),
    "dcn": ("dcn_bytes_per_second", "dcn_hop_seconds"),
    "nvlink": ("nvlink_bytes_per_second", "nvlink_hop_seconds"),
    "network": ("nic_bytes_per_second", "nic_hop_seconds"),
}


def link_rates(network: Torus | Switch) -> dict[LinkKind, tuple[float, float]]:
    """(bytes a second one way, seconds of a hop) of each kind of link of a network."""
    figures = vars(network)
    return {
        kind: (figures[rate], figures[hop]) for kind, (rate, hop) in LINK_FIELDS.items() if rate in figures
    }


def bound_name(bound: str, network: Interconnect) -> str:
    """The name of a step's bound: for `ici` and `dcn`, the links that this network has in their place.

    >>> bound_name("dcn", Switch(8, 4.5e11, 2e-6, 5e10, 4e-6, 1e-5)), bound_name("hbm", SharedMemory({}))
    ('network', 'hbm')
    """
    if isinstance(network, Switch):
        return {"ici": "nvlink", "dcn": "network"}.get(bound, bound)
    return "host" if isinstance(network, SharedMemory) and bound == "ici" else bound


def continues(inner: Link, outer: Link) -> bool:
    """Whether `outer` begins where `inner` ends, so that together they are one line or ring."""
    if inner.kind != outer.kind:
        return False
    return inner.kind != "ici" or (inner.dim == outer.dim and inner.stride * inner.size == outer.stride)


def join_links(inner: Link, outer: Link) -> Link:
    """Two links that continue each other, as one."""
    return Link(
        kind=inner.kind,
        size=inner.size * outer.size,
        one_way_bytes_per_second=inner.one_way_bytes_per_second,
        hop_seconds=inner.hop_seconds,
        dim=inner.dim,
        stride=inner.stride,
        ring=outer.ring,
        two_way=outer.two_way,
    )


def gather_figure(links: tuple[Link, ...]) -> float:
    """Seconds a byte of an all-gather over one axis, inside and then between domains, up to a constant."""
    figure, devices = 0.0, 1
    for outer in (False, True):
        phase = [link for link in links if link.is_outer == outer and link.one_way_bytes_per_second]
        size = prod(link.size for link in phase)
        if size > 1:
            inbound = sum(
                link.one_way_bytes_per_second * (2 if link.ring else 1) / link.stride for link in phase
            )
            figure += (size - 1) / size / inbound / devices
        devices *= size
    return figure


def link_choices(
    network: Interconnect,
    num_slices: int,
    dims: tuple[int, ...],
    sizes: tuple[int, ...],
    order: tuple[int, ...],
) -> Iterator[AxisLinks]:
    """The links of every axis, preferred ones first. order: of the axes' choice."""
    chosen = tuple(sizes[axis] for axis in order)
    if isinstance(network, Torus):
        choices = _torus_links(network, num_slices, dims, chosen)
    elif isinstance(network, Switch):
        choices = iter([_switch_links(dims[1], network, chosen)])
    else:
        choices = iter([tuple((Link("host", size, 0.0, 0.0),) if size > 1 else () for size in chosen)])
    back = sorted(range(len(order)), key=order.__getitem__)
    return (tuple(links[place] for place in back) for links in choices)


def _torus_links(
    torus: Torus, num_slices: int, dims: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[AxisLinks]:
    """The links of each axis on slices of a torus: the last axes to choose cross the slices."""
    over_slices = _split(sizes[::-1], num_slices)[::-1]
    within = tuple(size // slices for size, slices in zip(sizes, over_slices, strict=True))
    between = [_switched("dcn", slices, torus) for slices in over_slices]
    for folded in foldings(within, dims, torus.wraparound(dims)):
        yield tuple(_ici(shares, torus) + outer for shares, outer in zip(folded, between, strict=True))


def _ici(shares: Shares, torus: Torus) -> tuple[Link, ...]:
    rates = link_rates(torus)["ici"]
    return tuple(Link("ici", s.size, *rates, s.dim, s.stride, s.ring) for s in shares)


def _switch_links(domain: int, switch: Switch, sizes: tuple[int, ...]) -> AxisLinks:
    inside = _split(sizes, domain)
    return tuple(
        _switched("nvlink", inner, switch) + _switched("network", size // inner, switch)
        for size, inner in zip(sizes, inside, strict=True)
    )


def _switched(kind: LinkKind, size: int, network: Torus | Switch) -> tuple[Link, ...]:
    return (Link(kind, size, *link_rates(network)[kind]),) if size > 1 else ()


def _split(sizes: tuple[int, ...], total: int) -> tuple[int, ...]:
    """The divisor of `total` that each size takes, the first as large a one as it can.

    Prime by prime all of `total` is taken, since it divides the product of the sizes.
    """
    parts: list[int] = []
    for size in sizes:
        parts.append(gcd(size, total))
        total //= parts[-1]
    assert total == 1
    return tuple(parts)
