"""A contraction or a reshard device by device: the part of each array that each device holds.

Every device is a small picture of the whole array, and the part that it holds is coloured. So an AllGather
fills the pictures, a slice empties them, and an AllToAll turns rows into columns. Hatching is a partial sum:
the shape is complete, but its numbers are still to be added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm, prod

from markupsafe import Markup

from meshwright.cost.strategy import PricedStep, Strategy
from meshwright.notation.array import ShardedArray, subscript
from meshwright.notation.mesh import Mesh
from meshwright.report.draw.figure import svg_file
from meshwright.report.draw.marks import arrow, bar, disc, label, line, subscripted
from meshwright.report.pictures.block_maps import BlockMap, Grid, block_colour
from meshwright.units import format_bytes, format_count, format_seconds

MAX_PARTS = 16  # of an array along one side
# Pixels.
_MARGIN, _TITLE, _DEVICE, _GAP, _PANEL = 32, 74, 42, 9, 16
_AXIS, _CAPTION, _ROW_GAP, _ARROW, _SIGN = 22, 40, 18, 176, 40
_WHOLE = 92

_HATCH = Markup(
    '<defs><pattern id="partial" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="1.6" height="5" fill="#ffffff" fill-opacity="0.85"/>'
    "</pattern></defs>"
)


@dataclass(frozen=True)
class _Row:
    """An array before and after a step (or two operands and their product), the step, and its figures."""

    arrays: tuple[ShardedArray, ...]
    step: str
    figures: tuple[str, ...]


def contraction_svg(best: Strategy) -> str:
    """The strategy from the operands as given to the output, a row for each collective."""
    q, plan = best.question, best.contraction
    rows = [_step_row(step) for step in best.steps]
    work = f"{format_count(best.flops_per_device)} FLOPs per device", format_seconds(best.seconds_compute)
    multiplied = _Row((plan.lhs_computed, plan.rhs_computed, plan.product), "Multiply", work)
    rows.insert(len(plan.lhs_steps) + len(plan.rhs_steps), multiplied)
    lead = f"{best.name}: {format_seconds(best.seconds)} on {q.hardware.spec}, {q.dtype}"
    return _Drawing(q.mesh, rows).svg(f"{q.lhs} · {q.rhs} → {best.out}", lead)


def reshard_svg(array: ShardedArray, target: ShardedArray, steps: Sequence[PricedStep], mesh: Mesh) -> str:
    """The array before and after each collective."""
    rows = [_step_row(step) for step in steps] or [_Row((array, target), "Nothing moves", ())]
    seconds = format_seconds(sum(step.seconds for step in steps))
    return _Drawing(mesh, rows).svg(f"{array} → {target}", f"{seconds} in all")


def _step_row(step: PricedStep) -> _Row:
    c = step.collective
    figures = [format_bytes(step.num_bytes), format_seconds(step.seconds)]
    if c.op == "slice":
        figures = ["no communication"]
    if step.windowed:
        figures.append("overlaps the matmul")
    return _Row((c.operand, c.result), c.title + subscript(c.axes), tuple(figures))


class _Drawing:
    """Rows over one mesh. parts: for each array the parts along its dimensions, as fine as any row needs.

    So the colours of one array agree in all rows.
    """

    def __init__(self, mesh: Mesh, rows: Sequence[_Row]) -> None:
        self.mesh, self.rows, self.grid = mesh, rows, Grid(mesh)
        self.parts: dict[tuple[str, tuple[str, ...]], dict[str, int]] = {}
        for array in (array for row in rows for array in row.arrays):
            parts = self.parts.setdefault((array.name, array.dims), dict.fromkeys(array.dims, 1))
            for dim in array.dims:
                parts[dim] = lcm(parts[dim], mesh.size(array.axes_of(dim)))
        self.panel = self.grid.num_columns * (_DEVICE + _GAP) - _GAP
        self.grid_width = self.grid.num_panels * (self.panel + _PANEL) - _PANEL + _AXIS
        self.grid_height = self.grid.num_rows * (_DEVICE + _GAP) - _GAP
        self.column = max(self.grid_width, 160)

    def svg(self, title: str, lead: str) -> str:
        """The text of the SVG file."""
        lead = "; ".join(filter(None, (lead, self.grid.note)))
        width = max(2 * _MARGIN + 3 * self.column + _SIGN + _ARROW, 2 * _MARGIN + 7 * len(lead))
        height = _AXIS + self.grid_height + _CAPTION + _ROW_GAP
        body = [
            _HATCH,
            label(subscripted(title), _MARGIN, 36, size=19, weight=600),
            label(lead, _MARGIN, 58, "muted", size=13),
        ]
        for number, row in enumerate(self.rows):
            body.append(self._row(row, _TITLE + number * height, width))
        return svg_file(title, width, _TITLE + len(self.rows) * height + 8, Markup().join(body))

    def _row(self, row: _Row, top: float, width: float) -> Markup:
        """The whole array, before and after; or two operands and their product."""
        rule = line([(_MARGIN, top), (width - _MARGIN, top)], "line")
        top += 12
        middle, second = top + _AXIS + self.grid_height / 2, _MARGIN + self.column + _SIGN
        *given, result = row.arrays
        if len(given) == 1:
            first = self._whole(given[0], _MARGIN + self.column / 2, middle)
        else:
            times = disc(_MARGIN + self.column + _SIGN / 2 + _AXIS / 2, middle, 3, "bubble")
            first = self._array(given[0], _MARGIN, top) + times
        centre = second + self.column + _ARROW / 2
        return Markup().join(
            [
                rule,
                first,
                self._array(given[-1], second, top),
                arrow((centre - _ARROW / 2 + 24, middle), (centre + _ARROW / 2 - 24, middle)),
                label(subscripted(row.step), centre, middle - 14, anchor="middle", size=13.5, weight=600),
                *(
                    label(figure, centre, middle + 22 + 16 * number, "muted", anchor="middle")
                    for number, figure in enumerate(row.figures)
                ),
                self._array(result, second + self.column + _ARROW, top),
            ]
        )

    def _whole(self, array: ShardedArray, centre: float, middle: float) -> Markup:
        """The array itself, its blocks in their colours and its dimensions named."""
        rows, columns, shape = self._shape(array)
        x, y = centre - _WHOLE / 2, middle - _WHOLE / 2
        cells = product(range(shape[0]), range(shape[1]))
        return Markup().join(
            [
                *(_part(x, y, _WHOLE, cell, shape) for cell in cells),
                bar(x, y, _WHOLE, _WHOLE, "none", edge="hidden"),
                label("·".join(columns), centre, y - 8, "muted", anchor="middle", size=13),
                label("·".join(rows), x - 13, middle + 4, "muted", anchor="middle", size=13),
                label(array.name, centre, y + _WHOLE + 20, anchor="middle", size=13.5, weight=500),
            ]
        )

    def _array(self, array: ShardedArray, x: float, top: float) -> Markup:
        """The devices of the mesh, each with the part of `array` that it holds."""
        left = x + (self.column - self.grid_width) / 2 + _AXIS
        parts = [self._axis_names(left, top)]
        for cell in self.grid.cells():
            cx = left + cell.panel * (self.panel + _PANEL) + cell.column * (_DEVICE + _GAP)
            cy = top + _AXIS + cell.row * (_DEVICE + _GAP)
            parts.append(self._device(array, cell.coordinates, cx, cy))
        at = x + self.column / 2 + _AXIS / 2, top + _AXIS + self.grid_height + 24
        name = label(subscripted(str(array)), *at, anchor="middle", size=13.5, weight=500)
        return Markup().join([*parts, name])

    def _axis_names(self, left: float, top: float) -> Markup:
        grid, parts = self.grid, []
        for number, panel in enumerate(grid.panels()):
            names = [f"{axis} = {index}" for axis, index in panel.items()]
            names += [f"{grid.column_axis} →"] if grid.column_axis else []
            x = left + number * (self.panel + _PANEL) + self.panel / 2
            parts.append(label(", ".join(names), x, top + 13, "bubble", anchor="middle", size=11))
        if grid.row_axis:
            for words, y in ((grid.row_axis, 14), ("↓", 28)):
                parts.append(label(words, left - 12, top + _AXIS + y, "bubble", anchor="middle", size=11))
        return Markup().join(parts)

    def _device(self, array: ShardedArray, coordinates: dict[str, int], x: float, y: float) -> Markup:
        *dims, shape = self._shape(array)
        rows, columns = (self._held(array, coordinates, one) for one in dims)
        partial = bool(array.unreduced)
        return Markup().join(
            [
                bar(x, y, _DEVICE, _DEVICE, "band"),
                *(_part(x, y, _DEVICE, cell, shape, partial) for cell in product(rows, columns)),
                bar(x, y, _DEVICE, _DEVICE, "none", edge="hidden"),
            ]
        )

    def _shape(self, array: ShardedArray) -> tuple[list[str], list[str], tuple[int, int]]:
        """Dimensions drawn downwards, those drawn across, and the number of parts along each.

        Downwards the first dimension that is ever cut, across the others.
        """
        parts = self.parts[array.name, array.dims]
        cut = [dim for dim in array.dims if parts[dim] > 1]
        first = list(array.dims[:1] if len(cut) < 2 or array.dims[0] in cut else cut[:1])
        others = [dim for dim in (cut or array.dims) if dim not in first]
        shape = tuple(min(prod(parts[dim] for dim in dims), MAX_PARTS) for dims in (first, others))
        return first, others, (shape[0], shape[1])

    def _held(self, array: ShardedArray, coordinates: dict[str, int], dims: list[str]) -> list[int]:
        """The drawn parts along `dims`, folded row-major, that the device at these coordinates holds."""
        cut, parts = BlockMap(array, self.mesh), self.parts[array.name, array.dims]
        held, total = [0], prod(parts[dim] for dim in dims)
        for dim in dims:
            share = parts[dim] // cut.num_blocks(dim)
            first = cut.index(coordinates, (dim,)) * share
            held = [index * parts[dim] + part for index in held for part in range(first, first + share)]
        return sorted({part * min(total, MAX_PARTS) // total for part in held})


def _part(
    x: float, y: float, side: float, cell: tuple[int, int], shape: tuple[int, int], partial: bool = False
) -> Markup:
    """One part of an array drawn at (x, y), in the colour of its place; hatched if it is a partial sum."""
    (row, column), (num_rows, num_columns) = cell, shape
    width, height = side / num_columns, side / num_rows
    fills = [block_colour(row, num_rows, column, num_columns), *(["url(#partial)"] if partial else [])]
    return Markup().join(bar(x + column * width, y + row * height, width, height, fill) for fill in fills)
