"""Dimensions split and merged without moving a byte: `N -> K, G` and back.

N runs over K and then G, so the i-th of p equal shards of N is a block of [K, G] only if it is whole
rows (p divides K) or lies within one row (K divides p, and G takes what is left). A mesh axis goes
to one of them whole.
"""

from collections.abc import Mapping
from math import prod

from meshwright.errors import NotationError
from meshwright.notation.array import Axes, ShardedArray, dividing_degrees
from meshwright.notation.mesh import Mesh


def split_dim(
    array: ShardedArray, dim: str, parts: tuple[str, ...], mesh: Mesh, sizes: Mapping[str, int]
) -> ShardedArray:
    """`array` with `dim` written as `parts`, outermost first; its axes go to the parts in order.

    Raises NotationError where a shard of `dim` is no block of the parts, and says what would divide.

    >>> from meshwright.notation.parse import parse_array
    >>> wq, mesh = parse_array("wq[D_fsdp, N_tensor, H]"), Mesh({"fsdp": 4, "tensor": 8})
    >>> print(split_dim(wq, "N", ("K", "G"), mesh, {"K": 8, "G": 4}))
    wq[D_fsdp, K_tensor, G, H]
    """
    _known(array, (dim,))
    _sized(array, parts, sizes)
    if dim in sizes and sizes[dim] != prod(sizes[part] for part in parts):
        raise NotationError(
            f"{array}: {dim} = {sizes[dim]} is not {_product(parts, sizes)}; "
            f"fits: {dim} = {prod(sizes[part] for part in parts)}"
        )
    taken = _share(array, dim, parts, mesh, sizes)
    position = array.dims.index(dim)
    return ShardedArray(
        array.name,
        (*array.dims[:position], *parts, *array.dims[position + 1 :]),
        (*array.axes[:position], *taken, *array.axes[position + 1 :]),
        array.unreduced,
    )


def _share(
    array: ShardedArray, dim: str, parts: tuple[str, ...], mesh: Mesh, sizes: Mapping[str, int]
) -> list[Axes]:
    """The axes of each part: one passes to the next part once those before leave single rows."""
    taken: list[Axes] = [() for _ in parts]
    part, rows = 0, sizes[parts[0]]
    for axis in array.axes_of(dim):
        while rows == 1 and part + 1 < len(parts):
            part += 1
            rows = sizes[parts[part]]
        if rows % mesh.size(axis):
            fits = ", ".join(map(str, dividing_degrees(rows, mesh.num_devices)))
            raise NotationError(
                f"{array}: {dim} = {_product(parts, sizes)}: axis {axis} = {mesh.size(axis)} does not divide "
                f"{parts[part]} where {rows} of {sizes[parts[part]]} are left; fits: {axis} in {{{fits}}}"
            )
        taken[part] += (axis,)
        rows //= mesh.size(axis)
    return taken


def merge_dims(
    array: ShardedArray, parts: tuple[str, ...], dim: str, mesh: Mesh, sizes: Mapping[str, int]
) -> ShardedArray:
    """`array` with the adjacent dimensions `parts` as one, which takes their axes in order.

    Raises NotationError where a block of the parts is no shard of the whole: an inner part may be
    split only where those before it are split down to single rows.

    >>> from meshwright.notation.parse import parse_array
    >>> q, mesh = parse_array("q[B_data, K_tensor, G, H]"), Mesh({"data": 4, "tensor": 8})
    >>> print(merge_dims(q, ("K", "G"), "N", mesh, {"K": 8, "G": 4}))
    q[B_data, N_tensor, H]
    """
    _known(array, parts)
    _sized(array, parts, sizes)
    position = array.dims.index(parts[0])
    end = position + len(parts)
    if array.dims[position:end] != parts:
        raise NotationError(f"{array}: {', '.join(parts)} do not stand next to each other in this order")
    for count, outer in enumerate(parts, 1):
        rows = sizes[outer] // mesh.size(array.axes_of(outer))
        if rows > 1 and any(array.axes_of(inner) for inner in parts[count:]):
            raise NotationError(
                f"{array}: a block holds {rows} rows of {outer} and a part of each: "
                f"no shard of {dim}; fits: {outer} split {sizes[outer]} ways, or what follows it whole"
            )
    axes = tuple(axis for part in parts for axis in array.axes_of(part))
    return ShardedArray(
        array.name,
        (*array.dims[:position], dim, *array.dims[end:]),
        (*array.axes[:position], axes, *array.axes[end:]),
        array.unreduced,
    )


def _known(array: ShardedArray, dims: tuple[str, ...]) -> None:
    for dim in dims:
        if dim not in array.dims:
            raise NotationError(f"{array}: there is no dimension {dim}; it has {', '.join(array.dims)}")


def _sized(array: ShardedArray, parts: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    for part in parts:
        if part not in sizes:
            raise NotationError(f"{array}: the size of {part} is missing; give {part}=...")


def _product(parts: tuple[str, ...], sizes: Mapping[str, int]) -> str:
    return "·".join(parts) + " = " + "·".join(str(sizes[part]) for part in parts)
