"""A machine: its chips, their links, and the place of the axes of a mesh on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf, prod

from meshwright.errors import HardwareError, LayoutError
from meshwright.hardware.chip import Chip, SharedMemory, Switch, Torus
from meshwright.hardware.links import (
    AxisLinks,
    Interconnect,
    Link,
    continues,
    gather_figure,
    join_links,
    link_choices,
    link_rates,
)
from meshwright.hardware.network import NETWORKS
from meshwright.hardware.orders import choosing_orders, undominated
from meshwright.notation.mesh import Mesh
from meshwright.programs.efficiency import StepEfficiency
from meshwright.programs.program import DEFAULT as XLA
from meshwright.programs.program import PROGRAMS, TrainingProgram
from meshwright.units import format_bytes


@dataclass(frozen=True, eq=False)
class Placement:
    """The physical links of each mesh axis. Compared by identity: `Hardware.place` caches it."""

    sizes: Mapping[str, int]
    links: Mapping[str, tuple[Link, ...]]
    network: Torus | Switch | SharedMemory

    def __repr__(self) -> str:
        """The axes longer than one, each with the devices along its links.

        >>> from meshwright.hardware.catalog import load
        >>> load("v5e:4x4").place(Mesh({"data": 2, "tensor": 8}))
        Placement(data: 2 ici; tensor: 2 ici · 4 ici)
        """
        taken = (
            f"{axis}: " + " · ".join(f"{link.size} {link.kind}" for link in links)
            for axis, links in self.links.items()
            if links
        )
        return f"Placement({'; '.join(taken)})"

    def one_way(self) -> "Placement":
        """These links with every ring used in one direction only, as a simple ring algorithm does."""
        links = {
            axis: tuple(replace(link, two_way=False) for link in links) for axis, links in self.links.items()
        }
        return Placement(self.sizes, links, self.network)

    def over(self, network: Interconnect) -> "Placement":
        """These links with the bandwidths and hops of another network of the same form."""
        if isinstance(network, SharedMemory):
            return Placement(self.sizes, self.links, network)
        rates = {
            kind: {"one_way_bytes_per_second": rate, "hop_seconds": hop}
            for kind, (rate, hop) in link_rates(network).items()
        }
        links = {
            axis: tuple(replace(link, **rates[link.kind]) for link in links)
            for axis, links in self.links.items()
        }
        return Placement(self.sizes, links, network)

    @lru_cache(maxsize=65536)  # noqa: B019 - emptied by `forget_placements`
    def stretches(self, axes: tuple[str, ...]) -> tuple[Link, ...]:
        """The links of several axes, inner ones first; links that continue each other are joined."""
        for axis in axes:
            if axis not in self.links:
                raise LayoutError(
                    f"mesh axis {axis} is unknown; this mesh has {', '.join(self.links) or 'no axes'}"
                )
        return _joined(tuple(self.links[axis] for axis in axes))


@lru_cache(maxsize=65536)
def _joined(links_of_axes: tuple[tuple[Link, ...], ...]) -> tuple[Link, ...]:
    """The links of several axes, inner ones first; many placements have the same."""
    links = sorted(
        (link for links in links_of_axes for link in links),
        key=lambda link: (link.is_outer, link.dim, link.stride),
    )
    joined: list[Link] = []
    for link in links:
        if joined and continues(joined[-1], link):
            joined[-1] = join_links(joined[-1], link)
        else:
            joined.append(link)
    return tuple(joined)


@dataclass(frozen=True)
class Hardware:
    """Chips and how they are joined.

    spec: as the user wrote it. dims: the torus of one slice; (domains, GPUs a domain) for GPUs;
    (devices,) on a host. num_slices: copies of it joined by the data-centre network. software: the training
    program; the chip's `step` already has its factors.
    """

    spec: str
    chip: Chip
    dims: tuple[int, ...]
    num_slices: int = 1
    software: TrainingProgram = field(default_factory=lambda: PROGRAMS[XLA])
    num_chips: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_chips", self.num_slices * prod(self.dims))

    @property
    def num_hosts(self) -> int:
        """How many hosts the chips have, at least."""
        return -(-self.num_chips // self.chip.chips_per_host)

    @property
    def chips_per_node(self) -> int:
        """The chips of a slice, an NVLink domain or a host, which no outer link separates."""
        return self.dims[-1] if isinstance(self.chip.network, Switch) else prod(self.dims)

    def __repr__(self) -> str:
        chip = self.chip
        return f"Hardware({self.spec}: {self.num_chips:,} {chip.name} of {format_bytes(chip.hbm_bytes)})"

    def ideal(self) -> "Hardware":
        """This machine with steps that reach every rating."""
        return replace(self, chip=self.chip.ideal())

    def running(self, name: str) -> "Hardware":
        """This machine, whose `[step]` is of XLA's programs, with another training program on it.

        Raises HardwareError for an unknown program.
        """
        program = PROGRAMS[name]
        step = program.applied(self.chip.step, self.chip.compute_capability)
        return replace(self, software=program, chip=replace(self.chip, step=step))

    def over(self, name: str) -> "Hardware":
        """This machine with its nodes joined by another network.

        Raises HardwareError for an unknown network, or one that does not join nodes of the chip.
        """
        record, network = NETWORKS[name], self.chip.network
        if not isinstance(network, Switch) or record.link != "network":
            raise HardwareError(f"network {name} joins {record.joins}, and {self.spec} has no such links")
        network = replace(
            network,
            nic_hop_seconds=record.hop_seconds,
            nic_bytes_per_second=record.bytes_per_second or network.nic_bytes_per_second,
            by_nodes=record.by_nodes,
            between=name,
        )
        chip = replace(self.chip, network=network, step=record.applied(self.chip.step))
        return replace(self, chip=chip)

    def slowed(self, slowdown: float) -> "Hardware":
        """This machine with every step `slowdown` times longer."""
        return self.with_step(replace(self.chip.step, slowdown=slowdown))

    def with_step(self, step: StepEfficiency) -> "Hardware":
        """This machine with steps of another efficiency."""
        return replace(self, chip=replace(self.chip, step=step))

    def with_figures(
        self,
        *,
        nic_bytes_per_second: float | None = None,
        hbm_bytes_per_second: float | None = None,
        power_watts: float | None = None,
    ) -> "Hardware":
        """This machine with the given figures in place of its chip's; None keeps a figure.

        nic_bytes_per_second: one way, a GPU. power_watts: the power limit of a chip; its rating stays.
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
        """Whether the links of each dimension close to a ring (never on a switch)."""
        if isinstance(self.chip.network, Torus):
            return self.chip.network.wraparound(self.dims)
        return tuple(False for _ in self.dims)

    def place(self, mesh: Mesh) -> Placement:
        """The physical links of each axis of `mesh`; the last axis is the innermost.

        TPU: slices are taken by the outermost axes, the torus is folded (see fold.py). GPU: the
        innermost axes fill the NVLink domain, the rest goes over the network cards; an axis may
        take some of both. Raises LayoutError unless the mesh has a device for each chip.
        """
        if mesh.num_devices != self.num_chips:
            sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.sizes.items())
            raise LayoutError(
                f"mesh {sizes} has {mesh.num_devices} devices and {self.spec} has {self.num_chips} chips; "
                f"the axes must multiply to {self.num_chips}"
            )
        return _place(self.chip.network, self.num_slices, self.dims, tuple(mesh.sizes.items()))

    def placements(self, mesh: Mesh) -> tuple[Placement, ...]:
        """`place`, then other placements that are faster for some axis: at most 24, always the same.

        GPUs are taken in their order, so they have only `place`. On a torus axes may choose their links in
        another order than innermost first, and the first to choose may take another part of it. A placement
        is left out if another gathers no slower over any axis. The first call takes some milliseconds: price
        `place` for every layout, and these for the few best. Raises LayoutError as `place` does.
        """
        return _placements(self.chip.network, self.num_slices, self.dims, self.place(mesh))


_MOST_PLACEMENTS = 24


@lru_cache(maxsize=65536)
def _place(
    network: Interconnect, num_slices: int, dims: tuple[int, ...], axes: tuple[tuple[str, int], ...]
) -> Placement:
    sizes = tuple(size for _, size in axes if size > 1)
    innermost_first = choosing_orders(len(sizes))[0]
    return _placement(
        network, axes, next(iter(link_choices(network, num_slices, dims, sizes, innermost_first)))
    )


def _placement(network: Interconnect, axes: tuple[tuple[str, int], ...], links: AxisLinks) -> Placement:
    """The placement of `axes`; links: of each axis longer than one, in order."""
    taken = iter(links)
    return Placement(dict(axes), {axis: next(taken) if size > 1 else () for axis, size in axes}, network)


@lru_cache(maxsize=4096)
def _placements(
    network: Interconnect, num_slices: int, dims: tuple[int, ...], first: Placement
) -> tuple[Placement, ...]:
    """`first`, and the placements that no other beats."""
    if not isinstance(network, Torus):
        return (first,)
    sizes = tuple(size for size in first.sizes.values() if size > 1)
    links = [tuple(first.links[axis] for axis, size in first.sizes.items() if size > 1)]
    links += (
        choice
        for order in choosing_orders(len(sizes))
        for choice in link_choices(network, num_slices, dims, sizes, order)
    )
    best = undominated(((one, [gather_figure(axis) for axis in one]) for one in links), _MOST_PLACEMENTS)
    next(best)
    return (first, *(_placement(network, tuple(first.sizes.items()), one) for one in best))


def forget_placements() -> None:
    """Empties the caches of placements after a search, which makes thousands of them."""
    for cached in (Placement.stretches, _joined, _place, _placements):
        cached.cache_clear()
