"""A sharded array: `A[I_X, J_YZ]{U_W}`, with the mesh axes that split each dimension.

    A[I_X, J]       I is split over X; J is whole on every device
    A[I_XY, J]      I is split over X and then Y, X major
    A[I_X, J]{U_Y}  every device along Y holds a partial sum

Along a mesh axis that is not named the blocks are replicas. An array may use each mesh axis once.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, prod

from meshwright.dtypes import dtype_bytes
from meshwright.errors import NotationError, shorten
from meshwright.notation.mesh import Mesh

Axes = tuple[str, ...]


@dataclass(frozen=True)
class ShardedArray:
    """Dimensions (letters) and, for each, the mesh axes that split it, outermost first.

    >>> a = ShardedArray("A", ("I", "J"), (("X",), ()), ("Y",))
    >>> print(a)
    A[I_X, J]{U_Y}
    >>> a.axes_of("I"), a.dim_of("X"), a.dim_of("Z")
    (('X',), 'I', None)
    """

    name: str
    dims: tuple[str, ...]
    axes: tuple[Axes, ...]
    unreduced: Axes = ()

    def __post_init__(self) -> None:
        assert len(self.dims) == len(self.axes), f"{self.dims} and {self.axes} differ in rank"
        if len(set(self.dims)) < len(self.dims):
            dims = shorten(", ".join(self.dims))
            raise NotationError(f"{self.name}[{dims}]: a dimension is named twice")
        used: set[str] = set()
        for axis in (axis for axes in (*self.axes, self.unreduced) for axis in axes):
            if axis in used:
                raise NotationError(
                    f"{shorten(str(self))}: mesh axis {axis} is used twice; an array may use each axis once"
                )
            used.add(axis)

    @cached_property
    def _dim_of(self) -> dict[str, str]:
        return {axis: dim for dim, axes in zip(self.dims, self.axes, strict=True) for axis in axes}

    def axes_of(self, dim: str) -> Axes:
        """The mesh axes that split `dim`."""
        return self.axes[self.dims.index(dim)]

    def dim_of(self, axis: str) -> str | None:
        """The dimension that `axis` splits, or None."""
        return self._dim_of.get(axis)

    @cached_property
    def sharded_axes(self) -> Axes:
        """The mesh axes that split dimensions, in the order of the dimensions."""
        return tuple(axis for axes in self.axes for axis in axes)

    def replace(
        self,
        *,
        axes: Mapping[str, Axes] | None = None,
        unreduced: Axes | None = None,
        name: str | None = None,
    ) -> "ShardedArray":
        """This array with other axes on some dimensions, other partial sums or another name."""
        new_axes = tuple((axes or {}).get(dim, old) for dim, old in zip(self.dims, self.axes, strict=True))
        return ShardedArray(
            self.name if name is None else name,
            self.dims,
            new_axes,
            self.unreduced if unreduced is None else unreduced,
        )

    def same_layout(self, other: "ShardedArray") -> bool:
        """Whether both have the same dimensions, axes and partial sums; names may differ."""
        return (self.dims, self.axes, set(self.unreduced)) == (other.dims, other.axes, set(other.unreduced))

    def local_shape(self, mesh: Mesh, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of one device's block; every dimension must divide over its axes."""
        shape = []
        for dim, axes in zip(self.dims, self.axes, strict=True):
            if dim not in sizes:
                raise NotationError(f"{self}: the size of {dim} is missing; give {dim}=...")
            shards = mesh.size(axes)
            if sizes[dim] % shards:
                raise NotationError(
                    f"{self}: {dim} = {sizes[dim]} does not divide over {'·'.join(axes)} = {shards}; "
                    f"fits: {', '.join(map(str, dividing_degrees(sizes[dim], mesh.num_devices)))}"
                )
            shape.append(sizes[dim] // shards)
        return tuple(shape)

    def bytes_per_device(self, mesh: Mesh, sizes: Mapping[str, int], dtype: str) -> int:
        """Bytes of one device's block; half a byte is rounded up."""
        return ceil(prod(self.local_shape(mesh, sizes)) * dtype_bytes(dtype))

    def replicas(self, mesh: Mesh) -> int:
        """The number of devices that hold the same block (partial sums are not replicas)."""
        return mesh.num_devices // mesh.size(self.sharded_axes + self.unreduced)

    def __str__(self) -> str:
        dims = ", ".join(dim + subscript(axes) for dim, axes in zip(self.dims, self.axes, strict=True))
        partial = f"{{U{subscript(self.unreduced)}}}" if self.unreduced else ""
        return f"{self.name}[{dims}]{partial}"


_CAPITALS = re.compile(r"(?:[A-Z][0-9]*)+")


def split_subscript(word: str) -> Axes:
    """The axes of a subscript without braces: each capital is an axis, other words are one axis.

    >>> split_subscript("XY"), split_subscript("fsdp"), split_subscript("Data")
    (('X', 'Y'), ('fsdp',), ('Data',))
    """
    return tuple(re.findall(r"[A-Z][0-9]*", word)) if _CAPITALS.fullmatch(word) else (word,)


def subscript(axes: Axes) -> str:
    """Mesh axes as a subscript, in braces if these are needed: `_X`, `_XY`, `_{data,fsdp}`.

    >>> subscript(()), subscript(("X", "Y")), subscript(("fsdp",)), subscript(("data", "fsdp"))
    ('', '_XY', '_fsdp', '_{data,fsdp}')
    """
    if not axes:
        return ""
    joined = "".join(axes)
    return f"_{joined}" if split_subscript(joined) == axes else f"_{{{','.join(axes)}}}"


@lru_cache(maxsize=256)
def dividing_degrees(size: int, limit: int) -> tuple[int, ...]:
    """The twelve smallest degrees up to `limit` that divide `size`.

    >>> dividing_degrees(8, 64)
    (1, 2, 4, 8)
    """
    return tuple(degree for degree in range(1, min(size, limit, 4096) + 1) if size % degree == 0)[:12]
