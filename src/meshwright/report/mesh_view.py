"""The mesh and the arrays over it as the page shows them: notation, drawing and caption."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from meshwright.errors import NotationError
from meshwright.notation.mesh import Mesh
from meshwright.report.blocks import BlockMap, read_block_map
from meshwright.report.drawing import Grid, axis_class, blocks_svg
from meshwright.report.run_files import JsonDocument, winner

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
    """An array in the notation and, where it can be drawn, its blocks."""

    text: str
    svg: Markup | None
    caption: str


def mesh_of(plan: JsonDocument) -> Mesh | None:
    """The mesh of the winning candidate."""
    mesh = (winner(plan) or {}).get("mesh")
    return Mesh(dict(mesh)) if mesh else None


def drawings(plan: JsonDocument, mesh: Mesh, kind: str) -> list[Drawing]:
    """The `kind` ("weights" or "activations") of the plan, in its order."""
    arrays = ((plan.get("shardings") or {}).get(kind) or {}).values()
    sizes = dimension_sizes(plan)
    return [_drawing(str(text), read_block_map(str(text), mesh), sizes) for text in arrays]


def dimension_sizes(plan: JsonDocument) -> dict[str, int]:
    """Sizes of the letters that the plan's model and workload give."""
    model, workload = plan.get("model") or {}, plan.get("workload") or {}
    sizes = {letter: model[key] for letter, key in _SIZE_KEYS.items() if isinstance(model.get(key), int)}
    seq_len, batch_tokens = workload.get("seq_len"), workload.get("batch_tokens")
    if seq_len and batch_tokens:
        sizes |= {"T": seq_len, "S": seq_len, "B": batch_tokens // seq_len}
    return sizes


def subscripts(text: str, mesh: Mesh | None) -> Markup:
    """Text with its mesh axes as true subscripts, each in its colour; a copy of it still reads `D_fsdp`."""
    parts, end = [], 0
    for match in _SUBSCRIPTED.finditer(text):
        axes = match["axes"].strip("{}")
        known = [axis for axis in axes.split(",") if mesh and axis in mesh.sizes]
        if mesh and known:
            markup = Markup('{}<sub class="{}"><span class="sr">_</span>{}</sub>')
            parts += [
                text[end : match.start()],
                markup.format(match["base"], axis_class(mesh, known[0]), axes),
            ]
            end = match.end()
    return Markup().join([*parts, text[end:]])


def notation_html(text: str, mesh: Mesh | None) -> Markup:
    """The notation in its own type face, with true subscripts."""
    return Markup('<span class="notation">{}</span>').format(subscripts(text, mesh))


def shown_note(mesh: Mesh) -> str:
    """Says so where the grid is too large to be drawn whole."""
    grid = Grid(mesh)
    return (
        ""
        if grid.num_shown == mesh.num_devices
        else f"{grid.num_shown} of {mesh.num_devices:,} devices drawn"
    )


def _drawing(text: str, cut: BlockMap | None, sizes: Mapping[str, int]) -> Drawing:
    if cut is None:
        return Drawing(text, None, "not an array over this mesh")
    caption = _holding(cut)
    return Drawing(text, blocks_svg(cut), caption + _local_shape(cut, sizes))


def _local_shape(cut: BlockMap, sizes: Mapping[str, int]) -> str:
    """The shape of one block where the plan says all of its sizes and they divide, else nothing."""
    try:
        shape = cut.array.local_shape(cut.mesh, sizes)
    except NotationError:
        return ""
    return f" · [{', '.join(map(str, shape))}]"


def _holding(cut: BlockMap) -> str:
    blocks = "whole on every device" if cut.total_blocks == 1 else f"{cut.total_blocks:,} blocks"
    if cut.array.unreduced:
        return f"{blocks}, partial sums over {', '.join(cut.array.unreduced)}"
    if cut.total_blocks == 1:
        return blocks
    return f"{blocks} × {cut.num_replicas:,} replicas" if cut.num_replicas > 1 else f"{blocks}, one a device"
