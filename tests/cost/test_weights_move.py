"""Moving weights between layouts: brute force over devices, and figures by hand."""

from itertools import product
from math import prod

import numpy as np
import pytest

import meshwright as mw
from meshwright.cost.weights_move import shared_mesh, weights_move
from meshwright.errors import LayoutError
from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.models.parameters import dimensions, parameters
from meshwright.notation.array import ShardedArray
from meshwright.notation.mesh import Mesh

LAYOUTS = [
    Layout.of(fsdp=8), Layout.of(data=2, tensor=4), Layout.of(tensor=8, data=1), Layout.of(fsdp=2, tensor=4),
    Layout.of(fsdp=4, tensor=2), Layout.of(pipe=2, fsdp=2, tensor=2), Layout.of(data=4, tensor=2),
]  # fmt: skip


def block(array: ShardedArray, mesh: Mesh, sizes: dict[str, int], device: int) -> tuple[tuple[int, int], ...]:
    """The range of each dimension that a device holds."""
    places = dict(zip(mesh.sizes, np.unravel_index(device, tuple(mesh.sizes.values())), strict=True))
    ranges = []
    for dim, axes in zip(array.dims, array.axes, strict=True):
        index = 0
        for axis in axes:
            index = index * mesh.sizes[axis] + int(places[axis])
        size = sizes[dim] // prod(mesh.sizes[axis] for axis in axes)
        ranges.append((index * size, (index + 1) * size))
    return tuple(ranges)


@pytest.mark.parametrize(("before", "after"), [*product(LAYOUTS, LAYOUTS)])
def test_on_the_shared_mesh_every_device_holds_what_its_layout_says(before: Layout, after: Layout) -> None:
    config = mw.model("tiny", num_heads=8, num_kv_heads=8)
    shared, sizes = shared_mesh(before, after), dict(dimensions(config))
    assert shared.mesh.num_devices == 8
    move = weights_move(config, before, after, catalog.load("cpu:8"))
    for one in move.moves:
        param = parameters(config)[one.path]
        for layout, array in ((before, one.array), (after, one.target)):
            stored = layout.weight(one.path.rpartition("/")[2], param.letters)
            for device in range(8):
                expected = block(stored, layout.mesh, sizes, device)
                assert block(array, shared.mesh, sizes, device) == expected


def test_the_same_layout_moves_nothing() -> None:
    move = weights_move(mw.model("llama-3-8b"), LAYOUTS[0], LAYOUTS[0], catalog.load("h100:1x8"))
    assert move.seconds == 0 and move.sent_bytes == 0


def test_32b_from_fsdp_to_replicas_by_hand() -> None:
    """Each chip ends with an eighth of 65.5 GB, and began with 1/64: it receives, and sends, the rest.

    By rings: an all-to-all within the node keeps 1/8 of a 64th, then a gather of 8 blocks over nodes.
    """
    config = mw.model("qwen3-32b")
    move = weights_move(config, Layout.of(fsdp=64), Layout.of(data=8, tensor=8), catalog.load("h100:8x8"))
    elements = (
        prod(param.shape(dimensions(config)))
        for path, param in parameters(config).items()
        if "norm" not in path
    )
    matrices = 2 * sum(elements)
    by_hand = matrices / 64 * (7 / 8) + matrices / 8 * (7 / 8)
    assert move.sent_bytes == pytest.approx(by_hand, rel=1e-6)
    assert move.bytes_after == pytest.approx(matrices / 8, rel=0.01)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            Layout.of(fsdp=8),
            Layout.of(data=2, tensor=2),
            "has 8 devices and .* has 4; fits: equal numbers",
        ),
        (Layout.of(fsdp=2, tensor=3), Layout.of(fsdp=3, tensor=2), "axes end at 2 and at 3 devices"),
    ],
)
def test_layouts_without_a_mesh_in_common(before: Layout, after: Layout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        shared_mesh(before, after)
