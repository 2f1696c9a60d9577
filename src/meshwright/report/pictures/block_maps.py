"""Devices in a grid over the axes of a mesh, and the block of an array that each device holds.

Colour means block: two devices of one colour hold the same numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from math import cos, prod, radians, sin

from meshwright.errors import NotationError
from meshwright.notation.array import ShardedArray
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array

MAX_SHOWN = 8  # squares along one axis; more would be too small to distinguish
MAX_PANELS = 4  # and squares along one axis if there are panels


@dataclass(frozen=True)
class BlockMap:
    """An array cut into blocks over a mesh.

    >>> cut = BlockMap(parse_array("A[I_XY, J]"), Mesh({"X": 4, "Y": 2, "Z": 2}))
    >>> cut.num_blocks("I"), cut.total_blocks, cut.num_replicas
    (8, 8, 2)
    >>> cut.index({"X": 3, "Y": 1, "Z": 0}, ("I",))
    7
    """

    array: ShardedArray
    mesh: Mesh

    def num_blocks(self, *dims: str) -> int:
        """Blocks along these dimensions: the product of the axes that split them."""
        return prod(self.mesh.size(self.array.axes_of(dim)) for dim in dims)

    @property
    def total_blocks(self) -> int:
        """Blocks of the whole array."""
        return self.num_blocks(*self.array.dims)

    @property
    def num_replicas(self) -> int:
        """Devices that hold each block."""
        return self.array.replicas(self.mesh)

    def index(self, coordinates: dict[str, int], dims: tuple[str, ...]) -> int:
        """The block along `dims`, folded row-major, of the device at these mesh coordinates.

        Over several axes the first is major: index = c_1 |X_2| + c_2 for `I_{X1,X2}`.
        """
        index = 0
        for axis in (axis for dim in dims for axis in self.array.axes_of(dim)):
            index = index * self.mesh.size(axis) + coordinates[axis]
        return index

    @property
    def drawn_dims(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Dimensions drawn downwards and across: sharded ones first, then the others except layers (L)."""
        sharded = [dim for dim in self.array.dims if self.num_blocks(dim) > 1]
        if len(sharded) > 1:
            return (sharded[0],), tuple(sharded[1:])
        plain = [dim for dim in self.array.dims if dim not in sharded and dim != "L"]
        pair = sorted((sharded + plain)[:2], key=self.array.dims.index)
        return (tuple(pair[:1]), tuple(pair[1:])) if len(pair) > 1 else ((), tuple(pair))


def read_block_map(text: str, mesh: Mesh) -> BlockMap | None:
    """The array written in `text` over this mesh; None if it is not one."""
    try:
        array = parse_array(text)
        mesh.size(array.sharded_axes + array.unreduced)
    except NotationError:
        return None
    return BlockMap(array, mesh)


@dataclass(frozen=True)
class Cell:
    """One drawn device: its number, its mesh coordinates, and its place in the grid."""

    device: int
    coordinates: dict[str, int]
    panel: int
    row: int
    column: int


@dataclass(frozen=True)
class Grid:
    """A mesh on paper: its last two axes larger than 1 are rows and columns, the others panels."""

    mesh: Mesh

    @property
    def _axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.mesh.sizes.items() if size > 1)

    @property
    def column_axis(self) -> str | None:
        """The mesh axis drawn across."""
        return self._axes[-1] if self._axes else None

    @property
    def row_axis(self) -> str | None:
        """The mesh axis drawn downwards."""
        return self._axes[-2] if len(self._axes) > 1 else None

    @property
    def panel_axes(self) -> tuple[str, ...]:
        """The mesh axes with a panel for each of their indices."""
        return self._axes[:-2]

    @property
    def num_rows(self) -> int:
        """Rows that are drawn."""
        return self._shown(self.row_axis)

    @property
    def num_columns(self) -> int:
        """Columns that are drawn."""
        return self._shown(self.column_axis)

    def _shown(self, axis: str | None) -> int:
        return min(self.mesh.size(axis), MAX_PANELS if self.panel_axes else MAX_SHOWN) if axis else 1

    @property
    def num_panels(self) -> int:
        """Panels that are drawn."""
        return min(self.mesh.size(self.panel_axes), MAX_PANELS)

    @property
    def is_broad(self) -> bool:
        """Whether it needs the width of a page."""
        return self.num_columns * self.num_panels > 4

    def panels(self) -> Iterator[dict[str, int]]:
        """The indices along the panel axes of each panel."""
        ranges = (range(self.mesh.size(axis)) for axis in self.panel_axes)
        for indices in islice(product(*ranges), MAX_PANELS):
            yield dict(zip(self.panel_axes, indices, strict=True))

    def cells(self) -> Iterator[Cell]:
        """The devices that are drawn. They are numbered row-major over the mesh axes."""
        for panel, outer in enumerate(self.panels()):
            for row, column in product(range(self.num_rows), range(self.num_columns)):
                inner = {self.row_axis: row, self.column_axis: column}
                at = {axis: (outer | inner).get(axis, 0) for axis in self.mesh.axes}
                number = 0
                for axis, size in self.mesh.sizes.items():
                    number = number * size + at[axis]
                yield Cell(number, at, panel, row, column)

    @property
    def note(self) -> str:
        """A remark if only a part of the mesh is drawn."""
        shown = self.num_rows * self.num_columns * self.num_panels
        return "" if shown == self.mesh.num_devices else f"{shown} of {self.mesh.num_devices:,} devices drawn"


def block_colour(row: int, num_rows: int, column: int, num_columns: int) -> str:
    """The colour of a block as `#rrggbb`: hue by row, lightness by column (hue if there is one row).

    Source of the matrices: Björn Ottosson, "A perceptual color space for image processing" (2020).
    """
    if num_rows == 1:
        row, num_rows, column, num_columns = column, num_columns, 0, 1
    # If there are more rows than even steps can tell apart, the golden angle keeps neighbours apart.
    hue = 262 + (360 * row / num_rows if num_rows <= MAX_SHOWN else 137.5 * row) + 9 * (column // MAX_SHOWN)
    shade = (column % MAX_SHOWN) / (min(num_columns, MAX_SHOWN) - 1) if num_columns > 1 else 0.28
    lightness, chroma = 0.87 - 0.25 * shade, 0.085 + 0.05 * shade
    a, b = chroma * cos(radians(hue)), chroma * sin(radians(hue))
    l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
    )
    return "#" + "".join(f"{_srgb(min(max(channel, 0.0), 1.0)):02x}" for channel in linear)


def _srgb(linear: float) -> int:
    """One channel with the gamma of sRGB, in 256 steps."""
    return round(255 * (12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055))
