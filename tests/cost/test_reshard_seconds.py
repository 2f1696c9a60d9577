"""The price of a reshard's steps on a machine, and what the search makes of it."""

from itertools import product

import pytest

from meshwright.cost.collectives import collective_seconds
from meshwright.cost.reshard_seconds import step_price
from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of
from meshwright.notation.collective import Collective
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array
from meshwright.notation.resharding import cheapest_reshard

V = 10**9


def test_a_slice_is_free_and_a_collective_costs_its_price() -> None:
    mesh = Mesh({"X": 4, "Y": 4, "Z": 4})
    placement = catalog.load("v4p:4x4x4").place(mesh)
    price = step_price(placement)
    assert price("slice", ("X",), V) == 0
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        assert price(op, ("X", "Y"), V) == collective_seconds(op, V, ("X", "Y"), placement).seconds


@pytest.mark.parametrize(("shape", "op"), [("4x4x4", "permute"), ("16x16x16", "all_to_all")])
def test_a_permute_is_a_shift_or_an_all_to_all(shape: str, op: str) -> None:
    """On a ring of 16 blocks travel a/4 = 4 on the mean, a shift's only 1; on a ring of 4 they are equal."""
    size = int(shape.split("x")[0])
    placement = catalog.load(f"v5p:{shape}").place(Mesh({"X": size, "Y": size, "Z": size}))
    known = {
        name: collective_seconds(name, V, ("X", "Y"), placement).seconds for name in ("permute", "all_to_all")
    }
    assert step_price(placement)("permute", ("X", "Y"), V) == max(known.values()) == known[op]


def test_between_slices_a_gather_takes_what_the_slice_leaves() -> None:
    """data over two slices, tensor inside: each chip fetches its 64th over DCN, and ICI makes it whole."""
    mesh, sizes = Mesh({"data": 2, "tensor": 64}), {"D": 8192, "F": 32768}
    price = step_price(catalog.load("2*v5p:4x4x4").place(mesh))
    steps = cheapest_reshard(parse_array("w[D_data, F]"), parse_array("w[D, F]"), mesh, sizes, price)
    assert [(step.op, step.axes) for step in steps] == [
        ("slice", ("tensor",)),
        ("all_gather", ("data", "tensor")),
    ]


SPECS = {"wq": "BTD,DNH->BTNH", "wo": "BTNH,NHD->BTD", "w_in": "BTD,DF->BTF", "w_out": "BTF,FD->BTD"}
SIZES = {"B": 64, "T": 4096, "D": 4096, "N": 32, "H": 128, "F": 16384}


def _sent_bytes(op: str, num_devices: int, moved: int) -> float:
    """What a device sends at least: an all-to-all's n - 1 parts of V / n^2, and so on."""
    share = (num_devices - 1) / num_devices
    return moved * {"all_reduce": 2 * share, "all_to_all": share / num_devices}.get(op, share)


@pytest.mark.parametrize("values", list(product((1, 2), (1, 4), (1, 2), (1, 2), (False, True))))
def test_the_rules_are_the_cheapest_for_every_layout(values: tuple[int, int, int, int, bool]) -> None:
    """reshard() knows no prices; on the axes of an array no search sends less for what layouts ask."""
    layout = Layout.of(**dict(zip(WORDS, values, strict=True)))
    for name, spec in SPECS.items():
        forward = contraction_of(layout, name, spec)
        for plan in (forward, forward.lhs_gradient, forward.rhs_gradient):
            for steps in (plan.lhs_steps, plan.rhs_steps, plan.out_steps):
                if steps:
                    assert _by_rules_is_cheapest(layout, steps), [str(step) for step in steps]


WORDS = ("data", "fsdp", "context", "tensor", "sequence_parallel")


def _by_rules_is_cheapest(layout: Layout, steps: list[Collective]) -> bool:
    before, after = steps[0].operand, steps[-1].result
    used = {*before.sharded_axes, *before.unreduced, *after.sharded_axes}
    mesh = Mesh({axis: size for axis, size in layout.mesh.sizes.items() if axis in used})

    def price(op: str, axes: tuple[str, ...], moved: int) -> float:
        return 0.0 if op == "slice" else _sent_bytes(op, mesh.size(axes), moved)

    def total(steps: list[Collective]) -> float:
        return sum(price(step.op, step.axes, step.gathered_bytes(mesh, SIZES, "bf16")) for step in steps)

    return total(steps) <= total(cheapest_reshard(before, after, mesh, SIZES, price)) * (1 + 1e-9)
