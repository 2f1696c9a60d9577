"""SVG drawings: the mesh as a grid of devices, and arrays cut into the blocks that devices hold.

Colour means block: two devices of one colour hold the same numbers. All text is escaped by `Markup.format`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product

from markupsafe import Markup

from meshwright.notation.mesh import Mesh
from meshwright.report.blocks import BlockMap
from meshwright.report.colours import MAX_SHOWN, block_colour

MAX_PANELS = 4
_SIDE, _TOP = 84, 18  # of a drawn array, in pixels
_PANEL_GAP = 0.3  # of a square, between panels
_SMALLEST_NUMBERED = 10  # pixels: the number of a block is not readable in less


@dataclass(frozen=True)
class Cell:
    """One drawn device: its number, mesh coordinates and place in the grid."""

    device: int
    coordinates: dict[str, int]
    panel: int
    row: int
    column: int


@dataclass(frozen=True)
class Grid:
    """How a mesh is laid on paper: its last two real axes are rows and columns, the others panels."""

    mesh: Mesh

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.mesh.sizes.items() if size > 1)

    @property
    def column_axis(self) -> str | None:
        return self.active[-1] if self.active else None

    @property
    def row_axis(self) -> str | None:
        return self.active[-2] if len(self.active) > 1 else None

    @property
    def panel_axes(self) -> tuple[str, ...]:
        return self.active[:-2]

    @property
    def num_rows(self) -> int:
        return min(self.mesh.size(self.row_axis), self._most) if self.row_axis else 1

    @property
    def num_columns(self) -> int:
        return min(self.mesh.size(self.column_axis), self._most) if self.column_axis else 1

    @property
    def _most(self) -> int:
        """Squares along one axis: fewer where panels share the width."""
        return MAX_PANELS if self.panel_axes else MAX_SHOWN

    @property
    def num_panels(self) -> int:
        return min(self.mesh.size(self.panel_axes), MAX_PANELS)

    @property
    def is_broad(self) -> bool:
        """Whether it needs the width of a page to stay readable."""
        return self.num_columns * self.num_panels > 4

    @property
    def num_shown(self) -> int:
        return self.num_rows * self.num_columns * self.num_panels

    def panels(self) -> Iterator[dict[str, int]]:
        """Coordinates along the panel axes of each panel drawn."""
        ranges = (range(self.mesh.size(axis)) for axis in self.panel_axes)
        for indices in islice(product(*ranges), MAX_PANELS):
            yield dict(zip(self.panel_axes, indices, strict=True))

    def cells(self) -> Iterator[Cell]:
        for panel, outer in enumerate(self.panels()):
            for row, column in product(range(self.num_rows), range(self.num_columns)):
                coordinates = dict.fromkeys(self.mesh.axes, 0) | outer
                if self.row_axis:
                    coordinates[self.row_axis] = row
                if self.column_axis:
                    coordinates[self.column_axis] = column
                yield Cell(_device_number(self.mesh, coordinates), coordinates, panel, row, column)


def mesh_svg(mesh: Mesh) -> Markup:
    """The devices in a grid over the mesh's axes, joined along each axis in that axis's colour."""
    grid, side = Grid(mesh), 56
    pitch = side * 1.28
    left, top = (44 if grid.row_axis else 12), (66 if grid.panel_axes else 44)
    panel_width = grid.num_columns * pitch + 30
    width = left + grid.num_panels * panel_width
    height = top + grid.num_rows * pitch
    parts = [_mesh_links(grid, left, top, side, pitch, panel_width)]
    parts += [_mesh_axes(grid, left, top, side, pitch, panel_width)]
    for cell in grid.cells():
        x, y = left + cell.panel * panel_width + cell.column * pitch, top + cell.row * pitch
        parts.append(_device(cell, x, y, side))
    return _svg(
        width, height, f"mesh of {mesh.num_devices} devices: {mesh.sizes}", Markup().join(parts), "mesh"
    )


def blocks_svg(cut: BlockMap) -> Markup:
    """The array cut into blocks on the left, and on the right the block each device holds."""
    parts = [
        _array_blocks(cut),
        Markup('<path class="arrow" d="M115 60h16m-5-4 5 4-5 4"/>'),
        _device_blocks(cut, centre=186, width=100),
    ]
    return _svg(240, 108, f"{cut.array}: the block held by each device", Markup().join(parts), "blocks")


def axis_class(mesh: Mesh, axis: str) -> str:
    """The CSS class that gives a mesh axis its colour wherever it is named."""
    return f"axis-{mesh.axes.index(axis) % 6}" if axis in mesh.sizes else ""


def _device_number(mesh: Mesh, coordinates: dict[str, int]) -> int:
    number = 0
    for axis, size in mesh.sizes.items():
        number = number * size + coordinates[axis]
    return number


def _svg(width: float, height: float, label: str, body: Markup, kind: str) -> Markup:
    return Markup(
        '<svg class="{}" viewBox="0 0 {w:.0f} {h:.0f}" width="{w:.0f}" height="{h:.0f}" role="img" '
        'aria-label="{}">{}</svg>'
    ).format(kind, label, body, w=width, h=height)


def _device(cell: Cell, x: float, y: float, side: float) -> Markup:
    where = ", ".join(f"{axis} {index}" for axis, index in cell.coordinates.items())
    return Markup(
        "<g><title>device {}: {}</title>"
        '<rect class="device" x="{:.1f}" y="{:.1f}" width="{}" height="{}" rx="11"/>'
        '<text class="device-number" x="{:.1f}" y="{:.1f}">{}</text></g>'
    ).format(cell.device, where, x, y, side, side, x + side / 2, y + side / 2 + 6, cell.device)


def _mesh_links(grid: Grid, left: float, top: float, side: float, pitch: float, panel_width: float) -> Markup:
    lines = []
    for panel in range(grid.num_panels):
        x0, y0 = left + panel * panel_width + side / 2, top + side / 2
        x1, y1 = x0 + (grid.num_columns - 1) * pitch, y0 + (grid.num_rows - 1) * pitch
        if grid.column_axis:
            name = axis_class(grid.mesh, grid.column_axis)
            lines += [_line(x0, y0 + r * pitch, x1, y0 + r * pitch, name) for r in range(grid.num_rows)]
        if grid.row_axis:
            name = axis_class(grid.mesh, grid.row_axis)
            lines += [_line(x0 + c * pitch, y0, x0 + c * pitch, y1, name) for c in range(grid.num_columns)]
    return Markup().join(lines)


def _mesh_axes(grid: Grid, left: float, top: float, side: float, pitch: float, panel_width: float) -> Markup:
    """Names and sizes: columns above, rows at the left turned by a right angle, panels over each panel."""
    labels = []
    if axis := grid.column_axis:
        x = left + ((grid.num_columns - 1) * pitch + side) / 2
        labels.append(_axis_label(grid.mesh, axis, x, top - 16))
    if axis := grid.row_axis:
        y = top + ((grid.num_rows - 1) * pitch + side) / 2
        labels.append(_axis_label(grid.mesh, axis, left - 20, y, turned=True))
    for number, panel in enumerate(grid.panels()):
        text = ", ".join(f"{axis} = {index}" for axis, index in panel.items())
        x = left + number * panel_width + ((grid.num_columns - 1) * pitch + side) / 2
        labels.append(Markup('<text class="axis" x="{:.1f}" y="20">{}</text>').format(x, text))
    return Markup().join(labels)


def _axis_label(mesh: Mesh, axis: str, x: float, y: float, *, turned: bool = False) -> Markup:
    transform = f"rotate(-90 {x:.1f} {y:.1f})" if turned else ""
    return Markup('<text class="axis {}" x="{:.1f}" y="{:.1f}" transform="{}">{} = {}</text>').format(
        axis_class(mesh, axis), x, y, transform, axis, mesh.size(axis)
    )


def _line(x0: float, y0: float, x1: float, y1: float, name: str) -> Markup:
    return Markup('<path class="link {}" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>').format(name, x0, y0, x1, y1)


def _array_blocks(cut: BlockMap) -> Markup:
    rows, columns = cut.drawn_dims
    num_rows, num_columns = cut.num_blocks(*rows), cut.num_blocks(*columns)
    shown_rows, shown_columns = min(num_rows, MAX_SHOWN), min(num_columns, MAX_SHOWN)
    tall = _SIDE if rows else _SIDE / 3
    left, top = 22, _TOP + (_SIDE - tall) / 2
    width, height = _SIDE / shown_columns, tall / shown_rows
    parts = [
        _block(left + c * width, top + r * height, width, height, block_colour(r, num_rows, c, num_columns))
        for r, c in product(range(shown_rows), range(shown_columns))
    ]
    parts.append(_text("dim", "·".join(columns), left + _SIDE / 2, top - 6))
    parts.append(_text("dim", "·".join(rows), 10, top + tall / 2 + 4))
    return Markup().join(parts)


def _device_blocks(cut: BlockMap, *, centre: float, width: float) -> Markup:
    """The grid of devices around `centre`, each square in the colour and with the number of its block."""
    grid, (rows, columns) = Grid(cut.mesh), cut.drawn_dims
    num_rows, num_columns = cut.num_blocks(*rows), cut.num_blocks(*columns)
    squares_across = grid.num_columns * grid.num_panels + _PANEL_GAP * (grid.num_panels - 1)
    pitch = min(width / squares_across, _SIDE / grid.num_rows, 30)
    left, top = centre - squares_across * pitch / 2, _TOP + (_SIDE - grid.num_rows * pitch) / 2
    side, parts = pitch * 0.84, []
    for cell in grid.cells():
        row, column = cut.index(cell.coordinates, rows), cut.index(cell.coordinates, columns)
        x = left + (cell.panel * (grid.num_columns + _PANEL_GAP) + cell.column) * pitch
        y = top + cell.row * pitch
        colour = block_colour(row, num_rows, column, num_columns)
        parts.append(_block(x, y, side, side, colour, radius=side / 5))
        if side >= _SMALLEST_NUMBERED:
            number = row * num_columns + column
            parts.append(_text("block-number", number, x + side / 2, y + side / 2, size=min(10, side * 0.7)))
    return Markup().join(parts)


def _block(x: float, y: float, width: float, height: float, colour: str, *, radius: float = 0) -> Markup:
    return Markup(
        '<rect class="block" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="{:.1f}" '
        'style="fill:{}"/>'
    ).format(x, y, width, height, radius, colour)


def _text(name: str, text: str | int, x: float, y: float, *, size: float = 12) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" font-size="{:.1f}">{}</text>').format(
        name, x, y, size, text
    )
