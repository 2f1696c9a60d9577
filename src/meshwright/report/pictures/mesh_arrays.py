"""The mesh of a plan, and its arrays over it: pictures, captions, and the notation as HTML."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

from markupsafe import Markup

from meshwright.errors import NotationError
from meshwright.notation.mesh import Mesh
from meshwright.report.draw.figure import PHONE, TABLET, Panel, at_widths
from meshwright.report.draw.marks import arrow, bar, label, line
from meshwright.report.pictures.block_maps import MAX_SHOWN, BlockMap, Grid, block_colour, read_block_map
from meshwright.report.run_documents import JsonDocument, winner

_NARROW = 250  # pixels of a mesh of few columns
_SIDE, _TOP = 84, 18  # of a drawn array
_PANEL_GAP = 0.3  # of a square, between panels of devices
_SMALLEST_NUMBERED = 14  # pixels of a square that holds a number
_SUBSCRIPTED = re.compile(r"(?P<base>[A-Za-z]+)_(?P<axes>\{[^}]*\}|[A-Za-z0-9]+)")
_SIZE_KEYS = {
    "D": "d_model",
    "F": "d_ff",
    "N": "num_heads",
    "K": "num_kv_heads",
    "H": "d_head",
    "V": "vocab_size",
    "L": "num_layers",
}


@dataclass(frozen=True)
class Drawing:
    """An array in the notation, with its blocks if they can be drawn."""

    text: str
    svg: Markup | None
    caption: str


def mesh_of(plan: JsonDocument) -> Mesh | None:
    """The mesh of the chosen layout."""
    mesh = (winner(plan) or {}).get("mesh")
    return Mesh(dict(mesh)) if mesh else None


def drawings(plan: JsonDocument, mesh: Mesh, kind: str) -> list[Drawing]:
    """The "weights" or the "activations" of the plan, in its order."""
    arrays = ((plan.get("shardings") or {}).get(kind) or {}).values()
    sizes = _dimension_sizes(plan)
    lines = []
    for text in map(str, arrays):
        cut = read_block_map(text, mesh)
        caption = _caption(cut, sizes) if cut else "not an array over this mesh"
        lines.append(Drawing(text, blocks_svg(cut) if cut else None, caption))
    return lines


def notation_html(text: str, mesh: Mesh | None) -> Markup:
    """The notation in its own type face. Mesh axes are subscripts in their colours; a copy reads `D_fsdp`."""
    parts, end = [], 0
    for match in _SUBSCRIPTED.finditer(text):
        axes = match["axes"].strip("{}")
        known = [axis for axis in axes.split(",") if mesh and axis in mesh.sizes]
        if mesh and known:
            markup = Markup('{}<sub class="{}"><span class="sr">_</span>{}</sub>')
            parts += [
                text[end : match.start()],
                markup.format(match["base"], axis_colour(mesh, known[0]), axes),
            ]
            end = match.end()
    return Markup('<span class="notation">{}</span>').format(Markup().join([*parts, text[end:]]))


def axis_colour(mesh: Mesh, axis: str) -> str:
    """The palette's colour of a mesh axis."""
    return f"axis-{mesh.axes.index(axis) % 6}"


def mesh_panel(mesh: Mesh) -> Panel:
    """The devices in a grid over the mesh's axes, joined along each axis in its colour."""
    grid = Grid(mesh)
    return at_widths(partial(_mesh_panel, grid), *((TABLET, PHONE) if grid.is_broad else (_NARROW,)))


def _mesh_panel(grid: Grid, width: float) -> Panel:
    mesh, across = grid.mesh, grid.num_panels if width > PHONE else min(2, grid.num_panels)
    left, gap = 44 if grid.row_axis else 12, 24 if grid.panel_axes else 0
    pitch = min(72, ((width - left) / across - gap) / grid.num_columns)
    side, top = pitch * 0.78, 66 if grid.panel_axes else 44
    tall = grid.num_rows * pitch + top
    corners = [
        (left + n % across * (grid.num_columns * pitch + gap), top + n // across * tall)
        for n in range(grid.num_panels)
    ]
    parts = []
    for (x, y), outer in zip(corners, grid.panels(), strict=True):
        right, bottom = (grid.num_columns - 1) * pitch, (grid.num_rows - 1) * pitch
        cx, cy = x + side / 2, y + side / 2
        if axis := grid.column_axis:
            colour = axis_colour(mesh, axis)
            for n in range(grid.num_rows):
                parts.append(line([(cx, cy + n * pitch), (cx + right, cy + n * pitch)], colour, width=2))
            words = f"{axis} = {mesh.size(axis)}"
            parts.append(label(words, cx + right / 2, y - 14, colour, anchor="middle", size=13, weight=600))
        if axis := grid.row_axis:
            colour = axis_colour(mesh, axis)
            for n in range(grid.num_columns):
                parts.append(line([(cx + n * pitch, cy), (cx + n * pitch, cy + bottom)], colour, width=2))
            if x == left:
                at, words = (left - 20, cy + bottom / 2), f"{axis} = {mesh.size(axis)}"
                parts.append(label(words, *at, colour, anchor="middle", size=13, weight=600, turned=-90))
        words = ", ".join(f"{axis} = {index}" for axis, index in outer.items())
        parts.append(label(words, cx + right / 2, y - 36, "muted", anchor="middle"))
    for cell in grid.cells():
        x, y = corners[cell.panel]
        x, y = x + cell.column * pitch, y + cell.row * pitch
        where = ", ".join(f"{axis} {index}" for axis, index in cell.coordinates.items())
        title = f"device {cell.device}: {where}"
        parts.append(bar(x, y, side, side, "card", edge="line", radius=side / 5, title=title))
        size = max(11, min(17, side * 0.32))
        at = x + side / 2, y + side / 2 + size * 0.36
        parts.append(label(str(cell.device), *at, anchor="middle", size=size, weight=600))
    right, bottom = map(max, zip(*corners, strict=True))
    return Panel(right + grid.num_columns * pitch, bottom + tall - top, Markup().join(parts))


def blocks_svg(cut: BlockMap) -> Markup:
    """The array cut into blocks on the left, and on the right the block each device holds."""
    parts = [*_array_blocks(cut), arrow((115, 60), (131, 60)), *_device_blocks(cut, centre=181, width=92)]
    return Panel(228, 108, Markup().join(parts)).svg(f"{cut.array}: the block held by each device")


def _array_blocks(cut: BlockMap) -> list[Markup]:
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
    names = (("·".join(columns), left + _SIDE / 2, top - 6), ("·".join(rows), 10, top + tall / 2 + 4))
    return [*parts, *(label(words, x, y, "muted", anchor="middle", weight=600) for words, x, y in names)]


def _device_blocks(cut: BlockMap, *, centre: float, width: float) -> list[Markup]:
    """The grid of devices around `centre`, each square with the colour and the number of its block."""
    grid, (rows, columns) = Grid(cut.mesh), cut.drawn_dims
    num_rows, num_columns = cut.num_blocks(*rows), cut.num_blocks(*columns)
    across = grid.num_columns * grid.num_panels + _PANEL_GAP * (grid.num_panels - 1)
    pitch = min(width / across, _SIDE / grid.num_rows, 30)
    left, top = centre - across * pitch / 2, _TOP + (_SIDE - grid.num_rows * pitch) / 2
    side, parts = pitch * 0.84, []
    for cell in grid.cells():
        row, column = cut.index(cell.coordinates, rows), cut.index(cell.coordinates, columns)
        x = left + (cell.panel * (grid.num_columns + _PANEL_GAP) + cell.column) * pitch
        y = top + cell.row * pitch
        parts.append(_block(x, y, side, side, block_colour(row, num_rows, column, num_columns), side / 5))
        if side >= _SMALLEST_NUMBERED:
            words, at = str(row * num_columns + column), (x + side / 2, y + side / 2 + 4)
            parts.append(label(words, *at, "#10131c", anchor="middle", size=11, weight=600))
    return parts


def _block(x: float, y: float, width: float, height: float, colour: str, radius: float = 0) -> Markup:
    return bar(x, y, width, height, colour, edge="card", radius=radius)


def _dimension_sizes(plan: JsonDocument) -> dict[str, int]:
    """Sizes of the letters, from the plan's model and workload."""
    model, workload = plan.get("model") or {}, plan.get("workload") or {}
    sizes = {letter: model[key] for letter, key in _SIZE_KEYS.items() if isinstance(model.get(key), int)}
    seq_len, batch_tokens = workload.get("seq_len"), workload.get("batch_tokens")
    if seq_len and batch_tokens:
        sizes |= {"T": seq_len, "S": seq_len, "B": batch_tokens // seq_len}
    return sizes


def _caption(cut: BlockMap, sizes: Mapping[str, int]) -> str:
    """Blocks, replicas, partial sums, and the shape of one block if all of its sizes are known."""
    blocks = "whole on every device" if cut.total_blocks == 1 else f"{cut.total_blocks:,} blocks"
    if cut.array.unreduced:
        blocks += f", partial sums over {', '.join(cut.array.unreduced)}"
    elif cut.total_blocks > 1:
        blocks += f" × {cut.num_replicas:,} replicas" if cut.num_replicas > 1 else ", one per device"
    try:
        shape = cut.array.local_shape(cut.mesh, sizes)
    except NotationError:
        return blocks
    return f"{blocks} · [{', '.join(map(str, shape))}]"
