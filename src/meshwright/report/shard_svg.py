"""A contraction or a reshard drawn device by device: which part of each array each device holds.

Every device is a small picture of the whole array in which the part that it holds is coloured, one
colour a block. So an AllGather fills the pictures, a slice empties them, and an AllToAll turns rows
into columns. Hatching is a partial sum: the whole shape is there, its numbers are not yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm, prod

from markupsafe import Markup

from meshwright.cost.strategy import PricedStep, Strategy
from meshwright.notation.array import ShardedArray, subscript
from meshwright.notation.collective import Collective
from meshwright.notation.mesh import Mesh
from meshwright.report.blocks import BlockMap
from meshwright.report.colours import block_hex
from meshwright.report.drawing import Grid
from meshwright.report.mesh_view import shown_note
from meshwright.report.svg import arrow, notation, square, text
from meshwright.units import format_bytes, format_count, format_seconds

MAX_PARTS = 16  # of an array along one side
# Pixels.
_MARGIN, _TITLE, _DEVICE, _GAP, _PANEL = 32, 74, 42, 9, 16
_AXIS, _CAPTION, _ROW_GAP, _ARROW, _SIGN = 22, 40, 18, 176, 40
_WHOLE = 92

_HATCH = (
    '<defs><pattern id="partial" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="1.6" height="5" fill="#ffffff" fill-opacity="0.85"/>'
    "</pattern></defs>"
)
_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2430; }
.title { font-size: 19px; font-weight: 600; }
.lead { font-size: 13px; fill: #667085; }
.op { font-size: 13.5px; font-weight: 600; text-anchor: middle; }
.figure { font-size: 12px; fill: #667085; text-anchor: middle; }
.array { font-size: 13.5px; font-weight: 500; text-anchor: middle; }
.axis { font-size: 11px; fill: #98a2b3; text-anchor: middle; }
.dim { font-size: 13px; fill: #667085; text-anchor: middle; font-style: italic; }
.sign { fill: #98a2b3; }
.sub { font-size: 74%; }
.page { fill: #ffffff; }
.rule { stroke: #eaecf0; }
.empty { fill: #f4f5f7; }
.edge { fill: none; stroke: #d0d5dd; }
.arrow { fill: none; stroke: #98a2b3; stroke-width: 1.5; stroke-linecap: round; stroke-linejoin: round; }
"""


def contraction_svg(best: Strategy) -> str:
    """The strategy from the operands as given to the output, a row for each collective."""
    q, plan = best.question, best.contraction
    steps = best.steps
    num_operand_steps = len(plan.lhs_steps) + len(plan.rhs_steps)
    rows = [_step_row(step) for step in steps]
    product_row = _Row(
        (plan.lhs_computed, plan.rhs_computed, plan.product),
        "Multiply",
        (f"{format_count(best.flops_per_device)} FLOPs per device", format_seconds(best.seconds_compute)),
    )
    rows.insert(num_operand_steps, product_row)
    arrays = [array for row in rows for array in row.arrays]
    title = f"{q.lhs} · {q.rhs} → {best.out}"
    lead = f"{best.name}: {format_seconds(best.seconds)} on {q.hardware.spec}, {q.dtype}"
    return _Page(q.mesh, _cuts(arrays, q.mesh), rows).svg(title, lead)


def reshard_svg(array: ShardedArray, target: ShardedArray, steps: Sequence[PricedStep], mesh: Mesh) -> str:
    """The array before and after each collective."""
    rows = [_step_row(step) for step in steps] or [_Row((array, target), "Nothing moves", ())]
    arrays = [one for row in rows for one in row.arrays]
    seconds = format_seconds(sum(step.seconds for step in steps))
    return _Page(mesh, _cuts(arrays, mesh), rows).svg(f"{array} → {target}", f"{seconds} in all")


@dataclass(frozen=True)
class _Row:
    """Before and after (or two operands and their product), what happens, and its figures."""

    arrays: tuple[ShardedArray, ...]
    what: str
    figures: tuple[str, ...]


def _step_row(step: PricedStep) -> _Row:
    c: Collective = step.collective
    figures = ["no communication"] if c.op == "slice" else [format_bytes(step.num_bytes)]
    if c.op != "slice":
        figures.append(format_seconds(step.seconds))
    if step.windowed:
        figures.append("overlaps the matmul")
    return _Row((c.operand, c.result), c.title + subscript(c.axes), tuple(figures))


# For each array, by name and dimensions, the parts that its dimensions are drawn in.
_Cuts = dict[tuple[str, tuple[str, ...]], dict[str, int]]


def _cuts(arrays: Sequence[ShardedArray], mesh: Mesh) -> _Cuts:
    """The parts of each dimension, as many as its finest sharding has, so that colours agree in all rows."""
    found: _Cuts = {}
    for array in arrays:
        parts = found.setdefault((array.name, array.dims), dict.fromkeys(array.dims, 1))
        for dim in array.dims:
            parts[dim] = lcm(parts[dim], mesh.size(array.axes_of(dim)))
    return found


@dataclass(frozen=True)
class _Page:
    mesh: Mesh
    cuts: _Cuts
    rows: Sequence[_Row]

    @property
    def _grid(self) -> Grid:
        return Grid(self.mesh)

    @property
    def _grid_width(self) -> float:
        grid = self._grid
        panel = grid.num_columns * (_DEVICE + _GAP) - _GAP
        return grid.num_panels * (panel + _PANEL) - _PANEL + _AXIS

    @property
    def _row_height(self) -> float:
        return _AXIS + self._grid.num_rows * (_DEVICE + _GAP) - _GAP + _CAPTION + _ROW_GAP

    def svg(self, title: str, lead: str) -> str:
        """The page as one SVG document, which stands alone."""
        lead = "; ".join(filter(None, (lead, shown_note(self.mesh))))
        column = max(self._grid_width, 160)
        width = max(2 * _MARGIN + 3 * column + _SIGN + _ARROW, 2 * _MARGIN + 7 * len(lead))
        height = _TITLE + len(self.rows) * self._row_height + 8
        body = [notation(title, _MARGIN, 36, "title"), text(lead, _MARGIN, 58, "lead")]
        for number, row in enumerate(self.rows):
            body.append(self._row(row, _TITLE + number * self._row_height, column, width))
        return str(
            Markup(
                '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:.0f} {h:.0f}" width="{w:.0f}" '
                'height="{h:.0f}" role="img" aria-label="{label}"><style>{style}</style>{defs}'
                '<rect class="page" width="100%" height="100%" rx="12"/>{body}</svg>\n'
            ).format(
                w=width,
                h=height,
                label=title,
                style=Markup(_STYLE),
                defs=Markup(_HATCH),
                body=Markup().join(body),
            )
        )

    def _row(self, row: _Row, top: float, column: float, width: float) -> Markup:
        """An array whole, before and after; or two operands and their product."""
        rule = Markup('<path class="rule" d="M{} {:.1f}H{:.1f}"/>').format(_MARGIN, top, width - _MARGIN)
        top += 12
        middle = top + _AXIS + (self._grid.num_rows * (_DEVICE + _GAP) - _GAP) / 2
        second = _MARGIN + column + _SIGN
        *given, result = row.arrays
        if len(given) == 1:
            first = self._whole(given[0], _MARGIN + column / 2, middle)
        else:
            dot = Markup('<circle class="sign" cx="{:.1f}" cy="{:.1f}" r="3.5"/>')
            first = self._array(given[0], _MARGIN, top, column)
            first += dot.format(_MARGIN + column + _SIGN / 2 + _AXIS / 2, middle)
        centre = second + column + _ARROW / 2
        parts = [
            rule,
            first,
            self._array(given[-1], second, top, column),
            arrow(centre, middle, _ARROW / 2 - 24),
        ]
        parts.append(notation(row.what, centre, middle - 14, "op"))
        for number, figure in enumerate(row.figures):
            parts.append(text(figure, centre, middle + 22 + 16 * number, "figure"))
        parts.append(self._array(result, second + column + _ARROW, top, column))
        return Markup().join(parts)

    def _whole(self, array: ShardedArray, centre: float, middle: float) -> Markup:
        """The array itself, its blocks in their colours and its dimensions named."""
        parts = self.cuts[array.name, array.dims]
        rows, columns = _drawn_dims(array, parts)
        num_rows, num_columns = _shape(parts, rows), _shape(parts, columns)
        x, y = centre - _WHOLE / 2, middle - _WHOLE / 2
        cells = product(range(num_rows), range(num_columns))
        blocks = [_cell(x, y, _WHOLE, cell, (num_rows, num_columns)) for cell in cells]
        return Markup().join(
            [
                *blocks,
                square(x, y, _WHOLE, 'class="edge"'),
                text("·".join(columns), centre, y - 8, "dim"),
                text("·".join(rows), x - 13, middle + 4, "dim"),
                text(array.name, centre, y + _WHOLE + 20, "array"),
            ]
        )

    def _array(self, array: ShardedArray, x: float, top: float, column: float) -> Markup:
        """The devices of the mesh, each with the part of `array` that it holds."""
        grid = self._grid
        left = x + (column - self._grid_width) / 2 + _AXIS
        panel_width = grid.num_columns * (_DEVICE + _GAP) - _GAP + _PANEL
        parts = [self._axis_names(left, top, panel_width)]
        for cell in grid.cells():
            cx = left + cell.panel * panel_width + cell.column * (_DEVICE + _GAP)
            cy = top + _AXIS + cell.row * (_DEVICE + _GAP)
            parts.append(self._device(array, cell.coordinates, cx, cy))
        bottom = top + _AXIS + grid.num_rows * (_DEVICE + _GAP) - _GAP
        parts.append(notation(str(array), x + column / 2 + _AXIS / 2, bottom + 24, "array"))
        return Markup().join(parts)

    def _axis_names(self, left: float, top: float, panel_width: float) -> Markup:
        grid, parts = self._grid, []
        across = grid.num_columns * (_DEVICE + _GAP) - _GAP
        for number, panel in enumerate(grid.panels()):
            names = [f"{axis} = {index}" for axis, index in panel.items()]
            names += [f"{grid.column_axis} →"] if grid.column_axis else []
            parts.append(text(", ".join(names), left + number * panel_width + across / 2, top + 13, "axis"))
        if grid.row_axis:
            parts.append(text(f"{grid.row_axis}", left - 12, top + _AXIS + 14, "axis"))
            parts.append(text("↓", left - 12, top + _AXIS + 28, "axis"))
        return Markup().join(parts)

    def _device(self, array: ShardedArray, coordinates: dict[str, int], x: float, y: float) -> Markup:
        cut, parts = BlockMap(array, self.mesh), self.cuts[array.name, array.dims]
        dims = _drawn_dims(array, parts)
        shape = tuple(_shape(parts, one) for one in dims)
        rows, columns = (_held(cut, coordinates, parts, one) for one in dims)
        drawn = [square(x, y, _DEVICE, 'class="empty"')]
        for cell in product(range(shape[0]), range(shape[1])):
            if cell[0] in rows and cell[1] in columns:
                drawn.append(_cell(x, y, _DEVICE, cell, shape, partial=bool(array.unreduced)))
        drawn.append(square(x, y, _DEVICE, 'class="edge"'))
        return Markup().join(drawn)


def _cell(
    x: float, y: float, side: float, cell: tuple[int, int], shape: tuple[int, ...], *, partial: bool = False
) -> Markup:
    """One part of an array drawn at (x, y), in the colour of its place; hatched if a partial sum."""
    (row, column), (num_rows, num_columns) = cell, shape
    width, height = side / num_columns, side / num_rows
    rect = Markup('<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" fill="{}"/>')
    fills = [block_hex(row, num_rows, column, num_columns), *(["url(#partial)"] if partial else [])]
    return Markup().join(
        rect.format(x + column * width, y + row * height, width, height, fill) for fill in fills
    )


def _drawn_dims(array: ShardedArray, parts: dict[str, int]) -> tuple[list[str], list[str]]:
    """Dimensions drawn downwards and across: the first, and those of the others that are ever cut."""
    cut = [dim for dim in array.dims if parts[dim] > 1]
    first = array.dims[:1] if len(cut) < 2 or array.dims[0] in cut else cut[:1]
    return list(first), [dim for dim in (cut or array.dims) if dim not in first]


def _shape(parts: dict[str, int], dims: list[str]) -> int:
    """How many parts are drawn along `dims` folded: as many as can be told apart."""
    return min(prod(parts[dim] for dim in dims), MAX_PARTS)


def _held(cut: BlockMap, coordinates: dict[str, int], parts: dict[str, int], dims: list[str]) -> set[int]:
    """The drawn parts along `dims`, folded row-major, of which the device at these coordinates holds any."""
    held, total = {0}, prod(parts[dim] for dim in dims)
    for dim in dims:
        share = parts[dim] // cut.num_blocks(dim)
        first = cut.index(coordinates, (dim,)) * share
        held = {index * parts[dim] + part for index in held for part in range(first, first + share)}
    drawn = _shape(parts, dims)
    return {part * drawn // total for part in held}
