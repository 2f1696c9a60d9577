"""A machine: how many chips, how they are joined, and which links each axis of a mesh takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd, inf, prod
from typing import Literal

from meshwright.errors import HardwareError, LayoutError
from meshwright.hardware.chip import Chip, SharedMemory, Switch, Torus
from meshwright.hardware.fold import Shares, fold
from meshwright.notation.mesh import Mesh

LinkKind = Literal["ici", "dcn", "nvlink", "network", "host"]


@dataclass(frozen=True)
class Link:
    """A stretch of physical links that a mesh axis takes.

    kind: `ici` joins TPU chips, `dcn` TPU slices, `nvlink` the GPUs of a domain, `network` the
    domains, `host` the virtual devices of one host. size: devices along it.
    one_way_bytes_per_second: of one device in one direction.
    dim, stride, ring: its place on a torus (see fold.Share); a switch has none.
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
        """Whether it joins slices or NVLink domains, and so takes what the inner links leave."""
        return self.kind in ("dcn", "network")


@dataclass(frozen=True, eq=False)
class Placement:
    """The physical links of each mesh axis. Compared by identity: `Hardware.place` caches it."""

    sizes: Mapping[str, int]
    links: Mapping[str, tuple[Link, ...]]
    network: Torus | Switch | SharedMemory

    def one_way(self) -> "Placement":
        """The same links with every ring used in one direction only, as a simple ring algorithm does."""
        links = {
            axis: tuple(replace(link, two_way=False) for link in links) for axis, links in self.links.items()
        }
        return Placement(self.sizes, links, self.network)

    @lru_cache(maxsize=65536)  # noqa: B019 - placements are few and live as long as the process
    def stretches(self, axes: tuple[str, ...]) -> tuple[Link, ...]:
        """The links of several axes at once, those that continue each other joined, inner links first."""
        for axis in axes:
            if axis not in self.links:
                raise LayoutError(
                    f"mesh axis {axis} is unknown; this mesh has {', '.join(self.links) or 'no axes'}"
                )
        links = sorted(
            (link for axis in axes for link in self.links[axis]),
            key=lambda link: (link.is_outer, link.dim, link.stride),
        )
        joined: list[Link] = []
        for link in links:
            if joined and _continues(joined[-1], link):
                joined[-1] = _join(joined[-1], link)
            else:
                joined.append(link)
        return tuple(joined)


def _continues(inner: Link, outer: Link) -> bool:
    if inner.kind != outer.kind:
        return False
    return inner.kind != "ici" or (inner.dim == outer.dim and inner.stride * inner.size == outer.stride)


def _join(inner: Link, outer: Link) -> Link:
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


@dataclass(frozen=True)
class Hardware:
    """Chips and how they are joined.

    spec: as the user wrote it. dims: the torus of one slice; (domains, GPUs a domain) for GPUs;
    (devices,) on a host. num_slices: copies of it joined by the data-centre network.
    """

    spec: str
    chip: Chip
    dims: tuple[int, ...]
    num_slices: int = 1
    num_chips: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_chips", self.num_slices * prod(self.dims))

    def ideal(self) -> "Hardware":
        """This machine with chips whose step reaches every rating."""
        return replace(self, chip=self.chip.ideal())

    def with_figures(
        self,
        *,
        nic_bytes_per_second: float | None = None,
        hbm_bytes_per_second: float | None = None,
        power_watts: float | None = None,
    ) -> "Hardware":
        """This machine with its own figures where it differs from the catalog's; None keeps a figure.

        nic_bytes_per_second: one way, a GPU. power_watts: what a chip is given; its rating stays.
        Raises HardwareError for a figure that is not positive, or a network card where chips have none.
        """
        given = {
            "nic_bytes_per_second": nic_bytes_per_second,
            "hbm_bytes_per_second": hbm_bytes_per_second,
            "power_watts": power_watts,
        }
        for name, value in given.items():
            if value is not None and not 0 < value < inf:
                raise HardwareError(f"{self.spec}: {name} = {value} must be above 0 and finite")
        chip = self.chip
        if nic_bytes_per_second is not None:
            if not isinstance(chip.network, Switch):
                raise HardwareError(
                    f"{self.spec}: nic_bytes_per_second is of GPUs; {chip.name} has no network card"
                )
            chip = replace(chip, network=replace(chip.network, nic_bytes_per_second=nic_bytes_per_second))
        chip = replace(
            chip,
            hbm_bytes_per_second=hbm_bytes_per_second or chip.hbm_bytes_per_second,
            power_limit_watts=power_watts or chip.power_limit_watts,
        )
        return replace(self, chip=chip)

    @property
    def wraparound(self) -> tuple[bool, ...]:
        """For each dimension, whether its links close to a ring (never on a switch)."""
        if isinstance(self.chip.network, Torus):
            return self.chip.network.wraparound(self.dims)
        return tuple(False for _ in self.dims)

    def place(self, mesh: Mesh) -> Placement:
        """Which physical links each axis of `mesh` takes; the last axis is the innermost.

        TPU: slices are taken by the outermost axes, the torus is folded (see fold.py). GPU: the
        innermost axes fill the NVLink domain, the rest goes over the network cards; an axis may
        take some of both. Raises LayoutError where the mesh is not of as many devices as chips.
        """
        if mesh.num_devices != self.num_chips:
            sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.sizes.items())
            raise LayoutError(
                f"mesh {sizes} has {mesh.num_devices} devices and {self.spec} has {self.num_chips} chips; "
                f"the axes must multiply to {self.num_chips}"
            )
        return _place(self, tuple(mesh.sizes.items()))


@lru_cache(maxsize=65536)
def _place(hardware: Hardware, axes: tuple[tuple[str, int], ...]) -> Placement:
    network = hardware.chip.network
    sizes = tuple(size for _, size in axes)
    if isinstance(network, Torus):
        links = _torus_links(hardware, network, sizes)
    elif isinstance(network, Switch):
        links = _switch_links(hardware.dims[1], network, sizes)
    else:
        links = [(Link("host", size, 0.0, 0.0),) if size > 1 else () for size in sizes]
    names = [name for name, _ in axes]
    return Placement(dict(axes), dict(zip(names, links, strict=True)), network)


def _torus_links(hardware: Hardware, torus: Torus, sizes: tuple[int, ...]) -> list[tuple[Link, ...]]:
    over_slices = _split(sizes, hardware.num_slices)
    within = tuple(size // slices for size, slices in zip(sizes, over_slices, strict=True))
    folded = fold(within[::-1], hardware.dims, hardware.wraparound)[::-1]
    return [
        _ici(shares, torus) + _switched("dcn", slices, torus.dcn_bytes_per_second, torus.dcn_hop_seconds)
        for shares, slices in zip(folded, over_slices, strict=True)
    ]


def _ici(shares: Shares, torus: Torus) -> tuple[Link, ...]:
    return tuple(
        Link("ici", s.size, torus.one_way_bytes_per_second, torus.hop_seconds, s.dim, s.stride, s.ring)
        for s in shares
    )


def _switch_links(domain: int, switch: Switch, sizes: tuple[int, ...]) -> list[tuple[Link, ...]]:
    inside = _split(sizes[::-1], domain)[::-1]
    return [
        _switched("nvlink", inner, switch.nvlink_bytes_per_second, switch.nvlink_hop_seconds)
        + _switched("network", size // inner, switch.nic_bytes_per_second, switch.nic_hop_seconds)
        for size, inner in zip(sizes, inside, strict=True)
    ]


def _switched(kind: LinkKind, size: int, bytes_per_second: float, hop_seconds: float) -> tuple[Link, ...]:
    return (Link(kind, size, bytes_per_second, hop_seconds),) if size > 1 else ()


def _split(sizes: tuple[int, ...], total: int) -> tuple[int, ...]:
    """How much of `total` each size takes, the first as much as it can.

    Prime by prime all of `total` is taken, since it divides the product of the sizes.
    """
    parts: list[int] = []
    for size in sizes:
        parts.append(gcd(size, total))
        total //= parts[-1]
    assert total == 1
    return tuple(parts)
