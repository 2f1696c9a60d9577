"""The mesh: named axes with sizes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from meshwright.errors import NotationError

# With 64 axes of two a mesh has 1.8e19 devices, so no real mesh needs more.
MAX_MESH_AXES = 64


class Degrees(Protocol):
    """The number of devices along axes: of a mesh, or an array of the numbers of many meshes."""

    def size(self, axes: str | tuple[str, ...]) -> Any: ...


@dataclass(frozen=True)
class Mesh:
    """Devices arranged in named axes, the first axis outermost.

    >>> mesh = Mesh({"X": 4, "Y": 2})
    >>> mesh.num_devices, mesh.size("X"), mesh.size(("X", "Y"))
    (8, 4, 8)
    >>> print(mesh)
    Mesh({'X': 4, 'Y': 2})
    """

    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        if len(self.sizes) > MAX_MESH_AXES:
            raise NotationError(f"a mesh of {len(self.sizes)} axes; fits: up to {MAX_MESH_AXES}")
        for axis, size in self.sizes.items():
            if not isinstance(size, int) or size < 1:
                raise NotationError(f"mesh axis {axis} = {size!r}: a size is a positive integer")
        object.__setattr__(self, "sizes", dict(self.sizes))
        object.__setattr__(self, "_products", {})  # a cache, since pricing asks for the same sizes often

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def num_devices(self) -> int:
        return prod(self.sizes.values())

    def size(self, axes: str | tuple[str, ...]) -> int:
        """Devices along `axes` (one name, or several whose sizes multiply)."""
        products: dict[str | tuple[str, ...], int] = self.__dict__["_products"]
        if axes in products:
            return products[axes]
        names = (axes,) if isinstance(axes, str) else axes
        try:
            return products.setdefault(axes, prod(self.sizes[name] for name in names))
        except KeyError as error:
            known = ", ".join(list(self.sizes)[:12]) + (", ..." if len(self.sizes) > 12 else "")
            raise NotationError(
                f"mesh axis {error.args[0]} is unknown; this mesh has {known or 'no axes'}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __eq__(self, other: object) -> bool:
        """Whether both have the same axes in the same order."""
        return isinstance(other, Mesh) and tuple(self.sizes.items()) == tuple(other.sizes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.sizes.items()))

    def __str__(self) -> str:
        return f"Mesh({dict(self.sizes)})"
