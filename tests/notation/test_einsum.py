"""Contractions: for any shardings and roles, what devices compute is the dense product and gradient."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.notation.devices import Devices, meshes, run_contraction, shardings, whole

from meshwright.errors import NotationError
from meshwright.notation.einsum import (
    Contraction,
    Einsum,
    contraction,
)
from meshwright.notation.mesh import Mesh
from meshwright.notation.operation import placed_operation
from meshwright.notation.parse import parse_array

MESH = Mesh({"X": 4, "Y": 8, "Z": 2})


@dataclass(frozen=True)
class Case:
    """A contraction on a mesh, with the size of every letter."""

    mesh: Mesh
    plan: Contraction

    @property
    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(self.plan.einsum.letters, self.mesh.num_devices)


@st.composite
def specs(draw: st.DrawFn) -> str:
    """Two operands with batch, free and contracted letters, in any order: up to four letters."""
    kinds = draw(st.lists(st.sampled_from(["batch", "left", "right", "sum"]), min_size=2, max_size=4))
    named = list(zip("ABCD", kinds, strict=False))
    lhs, rhs, out = (
        "".join(draw(st.permutations([letter for letter, kind in named if kind in kinds_of])))
        for kinds_of in (("batch", "left", "sum"), ("batch", "right", "sum"), ("batch", "left", "right"))
    )
    return f"{lhs},{rhs}->{out}" if lhs and rhs and out else "AB,BC->AC"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any spec, mesh, shardings of all three arrays, and any role for every mesh axis."""
    spec, mesh = draw(specs()), draw(meshes(max_devices=8))
    einsum = Einsum.parse(spec)
    lhs = draw(shardings(mesh, einsum.lhs, "A", unreduced=True))
    rhs = draw(shardings(mesh, einsum.rhs, "B", unreduced=True))
    out = draw(shardings(mesh, einsum.out, "C"))
    roles = {
        axis: draw(st.sampled_from([*einsum.letters, None])) for axis in draw(st.permutations(mesh.axes))
    }
    return Case(mesh, contraction(spec, lhs, rhs, out, roles))


@given(cases())
def test_the_devices_compute_the_dense_product(case: Case) -> None:
    plan, devices = case.plan, Devices(case.mesh)
    lhs, rhs = whole(plan.lhs, case.sizes, seed=1), whole(plan.rhs, case.sizes, seed=2)
    blocks = run_contraction(plan, devices, devices.place(lhs, plan.lhs), devices.place(rhs, plan.rhs))
    devices.assert_holds(blocks, np.einsum(str(plan.einsum), lhs, rhs), plan.out)


@given(cases())
def test_the_devices_compute_both_gradients(case: Case) -> None:
    """d lhs = d out . rhs and d rhs = lhs . d out, each on the operands that the forward pass computed on."""
    plan, devices = case.plan, Devices(case.mesh)
    dense = {
        name: whole(array, case.sizes, seed)
        for seed, (name, array) in enumerate({"lhs": plan.lhs, "rhs": plan.rhs, "out": plan.out}.items())
    }
    for gradient, left, right in (
        (plan.lhs_gradient, "out", "rhs"),
        (plan.rhs_gradient, "lhs", "out"),
    ):
        blocks = run_contraction(
            gradient,
            devices,
            devices.place(dense[left], gradient.lhs),
            devices.place(dense[right], gradient.rhs),
        )
        devices.assert_holds(blocks, np.einsum(str(gradient.einsum), dense[left], dense[right]), gradient.out)


@given(cases())
def test_a_gradient_has_the_sharding_of_its_operand(case: Case) -> None:
    plan = case.plan
    for gradient, operand in ((plan.lhs_gradient, plan.lhs), (plan.rhs_gradient, plan.rhs)):
        assert gradient.out.name == f"d{operand.name}"
        assert (gradient.out.dims, gradient.out.axes) == (operand.dims, operand.axes)
        # The same index space, so the same FLOPs: a backward pass costs two forward ones.
        assert gradient.flops_per_device(case.mesh, case.sizes) == plan.flops_per_device(
            case.mesh, case.sizes
        )


@given(cases())
def test_all_devices_together_do_the_work_once_per_axis_without_role(case: Case) -> None:
    """FLOPs a device x devices = FLOPs x the devices that repeat them; counted by local shapes."""
    plan, mesh = case.plan, case.mesh
    local = dict(zip(plan.einsum.lhs, plan.lhs_computed.local_shape(mesh, case.sizes), strict=True))
    local |= dict(zip(plan.einsum.rhs, plan.rhs_computed.local_shape(mesh, case.sizes), strict=True))
    assert plan.flops_per_device(mesh, case.sizes) == 2 * np.prod(list(local.values()))
    repeats = mesh.size(tuple(axis for axis in mesh if plan.roles[axis] is None))
    assert (
        plan.flops_per_device(mesh, case.sizes) * mesh.num_devices == plan.einsum.flops(case.sizes) * repeats
    )


def _plan(lhs: str, rhs: str, out: str, roles: dict[str, str | None]) -> Contraction:
    a, b, c = parse_array(lhs), parse_array(rhs), parse_array(out)
    return contraction(f"{''.join(a.dims)},{''.join(b.dims)}->{''.join(c.dims)}", a, b, c, roles)


class TestTheFourCases:
    """How to Scale Your Model, "Sharded Matrices": the four ways that operands can meet."""

    def test_1_no_sharded_contracting_dimension_needs_nothing(self) -> None:
        plan = _plan("A[I_X, J]", "B[J, K_Y]", "C[I_X, K_Y]", {"X": "I", "Y": "K"})
        assert plan.steps == []
        assert str(plan.product) == "C[I_X, K_Y]"

    def test_2_one_side_sharded_on_it_is_gathered(self) -> None:
        plan = _plan("A[I, J_X]", "B[J, K]", "C[I, K]", {"X": None})
        assert [str(s) for s in plan.steps] == ["AllGather_{X} A[I, J_X] -> A[I, J]"]

    def test_2_or_the_other_side_is_sliced_and_the_product_summed(self) -> None:
        plan = _plan("A[I, J_X]", "B[J, K]", "C[I, K]", {"X": "J"})
        assert [str(s) for s in plan.steps] == [
            "Slice_{X} B[J, K] -> B[J_X, K]",
            "AllReduce_{X} C[I, K]{U_X} -> C[I, K]",
        ]

    def test_3_both_sharded_alike_yield_a_partial_sum(self) -> None:
        plan = _plan("A[I, J_X]", "B[J_X, K]", "C[I, K]", {"X": "J"})
        assert str(plan.product) == "C[I, K]{U_X}"
        assert [str(s) for s in plan.steps] == ["AllReduce_{X} C[I, K]{U_X} -> C[I, K]"]

    def test_3_which_a_reduce_scatter_finishes_where_the_output_is_split(self) -> None:
        plan = _plan("A[I, J_X]", "B[J_X, K]", "C[I, K_X]", {"X": "J"})
        assert [str(s) for s in plan.steps] == ["ReduceScatter_{X} C[I, K]{U_X} -> C[I, K_X]"]

    def test_3_or_nothing_where_the_partial_sum_is_wanted(self) -> None:
        plan = _plan("A[I, J_X]", "B[J_X, K]", "C[I, K]{U_X}", {"X": "J"})
        assert plan.steps == []

    @pytest.mark.parametrize(
        ("role", "gathered", "out"),
        [
            ("I", "AllGather_{X} B[J, K_X] -> B[J, K]", "C[I_X, K]"),
            ("K", "AllGather_{X} A[I_X, J] -> A[I, J]", "C[I, K_X]"),
        ],
    )
    def test_4_one_axis_on_both_free_dimensions_gathers_one(self, role: str, gathered: str, out: str) -> None:
        plan = _plan("A[I_X, J]", "B[J, K_X]", out, {"X": role})
        assert [str(s) for s in plan.steps] == [gathered]

    def test_orders_that_differ_are_brought_into_one(self) -> None:
        """J_XY and J_YX are different blocks; one operand must move before they can be multiplied."""
        plan = _plan("A[I, J_XY]", "B[J_YX, K]", "C[I, K]{U_XY}", {"X": "J", "Y": "J"})
        assert plan.lhs_computed.axes_of("J") == plan.rhs_computed.axes_of("J")
        assert plan.steps != []


class TestGradients:
    """AllGather <-> ReduceScatter, AllReduce <-> nothing: the collectives transpose."""

    def test_a_gathered_weight_has_its_gradient_scattered(self) -> None:
        """FSDP: W[D_X, F] is gathered before use; its gradient is a partial sum over the batch."""
        plan = _plan("x[B_X, D]", "w[D_X, F]", "y[B_X, F]", {"X": "B"})
        assert [str(s) for s in plan.steps] == ["AllGather_{X} w[D_X, F] -> w[D, F]"]
        assert [str(s) for s in plan.rhs_gradient.steps] == ["ReduceScatter_{X} dw[D, F]{U_X} -> dw[D_X, F]"]
        assert plan.lhs_gradient.steps == []

    def test_a_replicated_weight_has_its_gradient_summed(self) -> None:
        plan = _plan("x[B_X, D]", "w[D, F]", "y[B_X, F]", {"X": "B"})
        assert plan.steps == []
        assert [str(s) for s in plan.rhs_gradient.steps] == ["AllReduce_{X} dw[D, F]{U_X} -> dw[D, F]"]

    def test_column_then_row_parallel(self) -> None:
        """Megatron's f (identity / AllReduce) and g (AllReduce / identity)."""
        column = _plan("x[B, D]", "w_in[D, F_Y]", "h[B, F_Y]", {"Y": "F"})
        row = _plan("h[B, F_Y]", "w_out[F_Y, D]", "y[B, D]", {"Y": "F"})
        assert column.steps == [] and row.lhs_gradient.steps == [] and row.rhs_gradient.steps == []
        assert [s.op for s in row.steps] == [s.op for s in column.lhs_gradient.steps] == ["all_reduce"]


def test_published_flops() -> None:
    """A[B_X, D_Y] W[D_Y, F] on X4 Y8 Z4: 2BDF/(XY) a device, Z times repeated in all.

    Source: How to Scale Your Model, "Sharded Matrices", questions.
    """
    mesh, sizes = Mesh({"X": 4, "Y": 8, "Z": 4}), {"B": 128, "D": 64, "F": 32}
    plan = _plan("A[B_X, D_Y]", "W[D_Y, F]", "C[B_X, F]", {"X": "B", "Y": "D", "Z": None})
    each = plan.flops_per_device(mesh, sizes)
    assert each == 2 * 128 * 64 * 32 / (4 * 8)
    assert each * mesh.num_devices == 4 * plan.einsum.flops(sizes)


def test_a_stationary_weight_is_not_moved() -> None:
    w, x, y = (parse_array(text) for text in ("w[D, F_Y]", "x[B_XY, D]", "y[B_X, F_Y]"))
    roles = placed_operation((x, w), y, wanted=True, stored=frozenset({"w"})).roles
    assert roles == {"Y": "F", "X": "B"}
    plan = contraction("BD,DF->BF", x, w, y, roles)
    assert plan.rhs_steps == [] and [str(s) for s in plan.steps] == ["AllGather_{Y} x[B_XY, D] -> x[B_X, D]"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("BTD", "'BTD' is not a two-operand einsum such as 'BTD,DF->BTF'"),
        ("BTD->BT", "'BTD->BT' is not a two-operand einsum such as 'BTD,DF->BTF'"),
        ("B1,BD->D", "'B1,BD->D' is not a two-operand einsum such as 'BTD,DF->BTF'"),
        ("AB,BC,CD->AD", "'AB,BC,CD->AD' is not a two-operand einsum such as 'BTD,DF->BTF'"),
        ("BD,DF->BX", "'BD,DF->BX': X of the output is in neither operand"),
        ("BTD,DF->BF", "'BTD,DF->BF': T is in only one operand and not in the output"),
    ],
)
def test_what_is_no_contraction(spec: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        Einsum.parse(spec)
    assert str(caught.value) == message


def test_arrays_must_have_the_letters_of_the_einsum() -> None:
    with pytest.raises(NotationError) as caught:
        contraction("IJ,JK->IK", parse_array("A[J, I]"), parse_array("B[J, K]"), parse_array("C[I, K]"), {})
    assert str(caught.value) == "A[J, I] does not have the dimensions IJ of 'IJ,JK->IK'"


def test_letters() -> None:
    einsum = Einsum.parse(" BTKGH , BSKH -> BKGTS ")
    assert (einsum.letters, einsum.contracted, str(einsum)) == ("BTKGHS", "H", "BTKGH,BSKH->BKGTS")
    assert einsum.flops({"B": 2, "T": 3, "K": 5, "G": 7, "H": 11, "S": 13}) == 2 * 2 * 3 * 5 * 7 * 11 * 13
