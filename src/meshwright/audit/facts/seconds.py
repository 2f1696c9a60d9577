"""Seconds of a compiled program's collectives, reads and products on a machine."""

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.audit.facts.emitted import Emitted
from meshwright.audit.facts.groups import group_axes
from meshwright.cost.collectives import collective_seconds
from meshwright.cost.priced import PricedCollective
from meshwright.cost.reshard_seconds import sent_bytes
from meshwright.cost.transfer_prices import at_step_rates
from meshwright.hardware.chip import Chip
from meshwright.hardware.topology import Hardware, Placement
from meshwright.notation.array import Axes
from meshwright.notation.mesh import Mesh


def step_prices(hardware: Hardware, mesh: Mesh) -> "Prices":
    """Prices at the rates that the planner uses for a step."""
    machine = at_step_rates(hardware)
    parts = _cut_at_slices(mesh, hardware.num_slices)
    placed = None if parts is None else machine.place(parts)
    return Prices(mesh, machine.place(mesh), machine.chip, mesh, parts, placed)


def _cut_at_slices(mesh: Mesh, num_slices: int) -> Mesh | None:
    """The mesh with its outermost axis cut in two, across slices and within one.

    None if either part has size one.
    """
    first = next((axis for axis, size in mesh.sizes.items() if size > 1), "")
    if num_slices == 1 or not first or mesh.size(first) <= num_slices or mesh.size(first) % num_slices:
        return None
    inner = {axis: size // num_slices if axis == first else size for axis, size in mesh.sizes.items()}
    return Mesh({f"{first} across slices": num_slices, **inner})


@dataclass(frozen=True)
class Prices:
    """Prices of collectives on a mesh.

    mesh: the mesh whose axes collectives have. placement, chip: None if no hardware is named. named: the
    user's mesh; None if `mesh` was inferred, since its axes then have no names. parts, parts_placement: the
    mesh with its outermost axis cut between slices: XLA sums within slices and then across them.
    """

    mesh: Mesh
    placement: Placement | None
    chip: Chip | None
    named: Mesh | None = None
    parts: Mesh | None = None
    parts_placement: Placement | None = None

    def seconds(self, e: Emitted) -> float | None:
        """Seconds per step, hidden or not; None without hardware, or if groups follow no axes.

        A tensor that is sent together with others gets its share by bytes, since all wait for the first hop
        together.
        """
        if self.placement is None or not e.axes:
            return 0.0 if self.placement and e.collective.groups.size == 1 else None
        axes, placement = self._over(e)
        if placement is None or not axes:
            return None
        tensor_bytes = self.gathered(e)
        together = max(
            tensor_bytes, tensor_bytes * e.collective.together_bytes // max(e.collective.gathered_bytes, 1)
        )
        price = collective_seconds(e.collective.op, together, axes, placement)
        return price.seconds * e.runs * (tensor_bytes / together if together else 1.0)

    def total_seconds(self, emitted: Iterable[Emitted]) -> float | None:
        """Seconds per step of several collectives; None if one has none."""
        seconds = [self.seconds(e) for e in emitted]
        return None if None in seconds else sum(s for s in seconds if s is not None)

    def gather_seconds(self, num_bytes: int, axes: Axes) -> float:
        """Seconds to gather an array of `num_bytes` over axes; 0 without hardware."""
        if self.placement is None or not axes:
            return 0.0
        return collective_seconds("all_gather", num_bytes, axes, self.placement).seconds

    def _over(self, e: Emitted) -> tuple[Axes, Placement | None]:
        """A collective's axes and their placement; on the mesh `parts` if it runs over a part of an axis."""
        if not e.is_part or self.parts is None:
            return e.axes, self.placement
        within = group_axes(e.collective.groups, self.parts)
        return (within.axes or (), self.parts_placement) if not within.note else ((), None)

    def planned_sent(self, p: PricedCollective) -> float:
        """Planned bytes that each device sends in a step."""
        return sent_bytes(p.op, p.gathered_bytes, self.mesh.size(p.axes)) * p.count

    def sent(self, e: Emitted) -> int:
        """Bytes that each device sends in a step."""
        groups = e.collective.groups
        n = self.mesh.size(e.axes) if e.axes and not e.is_part else max(map(len, groups.members), default=1)
        return round(sent_bytes(e.collective.op, self.gathered(e), n) * e.runs)

    def gathered(self, e: Emitted) -> int:
        """V of one run, padding included."""
        return e.gathered_bytes + e.collective.padding_bytes

    def read_seconds(self, num_bytes: float) -> float | None:
        """Seconds to read `num_bytes` from a device's memory; None without hardware."""
        return num_bytes / self.chip.hbm_bytes_per_second if self.chip else None

    def product_seconds(self, flops: float, dtype: str) -> float | None:
        """Seconds to compute `flops` in large products; None without hardware."""
        return flops / self.chip.flops(dtype) if self.chip else None

    def over(self, axes: Iterable[str], size: int) -> str:
        """The axes in words: `data·tensor`, or groups of `size` devices if axes have no names."""
        names = "·".join(axes)
        return f"`{names}`" if self.named and names else f"groups of {size} devices"
