"""The weights of a model moved from one layout to another: derived collectives, seconds and bytes.

Two layouts number the same devices, each by axes of its own. The axes of both are cut where the axes of one
end inside an axis of the other; on a mesh of the parts both layouts are shardings.

    fsdp=64                    fsdp0=8, fsdp1=8
    data=8,tensor=8            data = fsdp0, tensor = fsdp1
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from meshwright.cost.reshard_seconds import PricedReshard, priced_reshard, step_price
from meshwright.dtypes import dtype_bytes
from meshwright.errors import LayoutError
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import Param, dimensions, parameters
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.mesh import Mesh
from meshwright.notation.resharding import cheapest_reshard


@dataclass(frozen=True)
class SharedMesh:
    """The mesh of the parts of two layouts' axes; before, after: the parts of each layout's axes."""

    mesh: Mesh
    before: Mapping[str, Axes]
    after: Mapping[str, Axes]


@dataclass(frozen=True)
class WeightMove:
    """A parameter's move; layers: of its stack, 1 for a parameter without layers."""

    path: str
    array: ShardedArray
    target: ShardedArray
    reshard: PricedReshard
    layers: int

    def buffer_bytes(self, *, by_layer: bool) -> float:
        """Most bytes on a chip in addition to the stored array: of the whole stack, or of one layer."""
        return self.reshard.peak_bytes() / (self.layers if by_layer else 1)


@dataclass(frozen=True)
class WeightsMove:
    """All moves of a model's weights. bytes_before, bytes_after: of the weights on a chip."""

    shared: SharedMesh
    moves: tuple[WeightMove, ...]
    dtype: str
    bytes_before: float
    bytes_after: float

    @property
    def seconds(self) -> float:
        """Seconds if parameters move one after another."""
        return sum(move.reshard.seconds for move in self.moves)

    @property
    def sent_bytes(self) -> float:
        """Bytes that one chip sends."""
        return sum(move.reshard.sent_bytes for move in self.moves)

    def peak_bytes(self, *, in_place: bool, by_layer: bool) -> float:
        """Most bytes of weights on a chip during the move.

        in_place: a part of the weights is freed as soon as it has moved. Otherwise both copies stay.
        """
        buffer = max((move.buffer_bytes(by_layer=by_layer) for move in self.moves), default=0.0)
        kept = max(self.bytes_before, self.bytes_after) if in_place else self.bytes_before + self.bytes_after
        return kept + buffer

    def rows(self) -> list[dict[str, Any]]:
        """A row for each parameter: its shardings, collectives, seconds, and bytes that a chip sends."""
        return [
            {
                "parameter": moved.path,
                "before": str(moved.array),
                "after": str(moved.target),
                "steps": [str(step) for step in moved.reshard.steps],
                "seconds": moved.reshard.seconds,
                "sent_bytes": round(moved.reshard.sent_bytes),
            }
            for moved in self.moves
        ]


def shared_mesh(before: Layout, after: Layout) -> SharedMesh:
    """A mesh of the parts of both layouts, which each can be written on.

    Raises LayoutError if they have different numbers of devices, or axes that end at two sizes
    that do not divide each other.
    """
    sizes = [{axis: size for axis, size in one.mesh.sizes.items() if size > 1} for one in (before, after)]
    counts = [prod(one.values()) for one in sizes]
    if counts[0] != counts[1]:
        raise LayoutError(
            f"layout {before} has {counts[0]} devices and {after} has {counts[1]}; fits: equal numbers"
        )
    # Numbers of devices inside the end of each axis, counted from the innermost.
    ends = sorted({end for one in sizes for end in _ends(one)} | {1})
    for inner, outer in pairwise(ends):
        if outer % inner:
            raise LayoutError(
                f"layouts {before} and {after} have no mesh in common: axes end at {inner} and at {outer} "
                f"devices, and {inner} does not divide {outer}; fits: degrees that are powers of two"
            )
    first, second = (_parts(one, ends) for one in sizes)
    names: dict[int, str] = {}
    for axis, parts in first.items():
        names |= {end: f"{axis}{n}" if len(parts) > 1 else axis for n, end in enumerate(parts)}
    mesh = Mesh({names[outer]: outer // inner for inner, outer in reversed(list(pairwise(ends)))})

    def named(parts: Mapping[str, list[int]]) -> dict[str, Axes]:
        return {axis: tuple(names[end] for end in inside) for axis, inside in parts.items()}

    return SharedMesh(mesh, named(first), named(second))


def _ends(sizes: Mapping[str, int]) -> list[int]:
    ends, inside = [], 1
    for size in reversed([*sizes.values()]):
        inside *= size
        ends.append(inside)
    return ends


def _parts(sizes: Mapping[str, int], ends: list[int]) -> dict[str, list[int]]:
    """The ends within each axis, outermost first; an end names the part of the mesh up to it."""
    parts, inside = {}, 1
    for axis, size in reversed([*sizes.items()]):
        parts[axis] = [end for end in reversed(ends) if inside < end <= inside * size]
        inside *= size
    return dict(reversed(parts.items()))


def weights_move(config: ModelConfig, before: Layout, after: Layout, hardware: Hardware) -> WeightsMove:
    """The cheapest collectives for every parameter, from its stored sharding before to that after.

    Weights travel in the narrower type of the two layouts. Stages of a pipeline split the stack's letter.
    Raises LayoutError as `shared_mesh` does, or if a parameter does not divide.
    """
    shared = shared_mesh(before, after)
    dtypes = [one.precision.weights_dtype for one in (before, after)]
    dtype = min(dtypes, key=dtype_bytes)
    placement = hardware.place(shared.mesh)
    price, moves = step_price(placement), []
    totals = [0.0, 0.0]
    for path, param in parameters(config).items():
        sizes = dimensions(config, path)
        arrays = [
            _on(shared.mesh, layout, parts, path, param)
            for layout, parts in ((before, shared.before), (after, shared.after))
        ]
        steps = cheapest_reshard(arrays[0], arrays[1], shared.mesh, sizes, price, dtype)
        block = arrays[0].bytes_per_device(shared.mesh, sizes, dtype)
        layers = sizes[param.letters[0]] if "/" in path else 1
        moves.append(WeightMove(path, arrays[0], arrays[1], priced_reshard(steps, block, placement), layers))
        for number, array in enumerate(arrays):
            totals[number] += array.bytes_per_device(shared.mesh, sizes, dtypes[number])
    return WeightsMove(shared, tuple(moves), dtype, totals[0], totals[1])


def _on(mesh: Mesh, layout: Layout, parts: Mapping[str, Axes], path: str, param: Param) -> ShardedArray:
    """A weight as a layout stores it, over the parts of its axes."""
    stored = layout.weight(path.rpartition("/")[2], param.letters)
    axes = tuple(
        tuple(part for axis in of_dim for part in parts.get(axis, ()) if part in mesh.sizes)
        for of_dim in stored.axes
    )
    return ShardedArray(stored.name, stored.dims, axes)
