"""Two partial sums that the compiler adds on each device, and sums once."""

import pytest
from tests.audit.hlo_text import HEAD

from meshwright.audit.compare.added import join_added, join_equal
from meshwright.audit.compare.line_up import TensorRow, line_up
from meshwright.audit.facts.communication import collectives
from meshwright.audit.facts.emitted import on_mesh
from meshwright.audit.hlo.read import parse_hlo
from meshwright.cost.priced import PricedCollective
from meshwright.notation.mesh import Mesh

MESH = Mesh({"tensor": 8})


def _named(scope: str) -> str:
    return f'metadata={{op_name="jit(step)/layers/{scope}/op"}}'


def _text(shared: str, product: str) -> str:
    """The routed rows are added to `shared`, and the result is summed in the scope of the routed experts."""
    return (
        HEAD
        + f"""ENTRY %main {{
  %h = bf16[32,64] parameter(0)
  %w = bf16[64,128] parameter(1)
  %rows = bf16[16,128] parameter(2)
  %places = s32[16,1] parameter(3)
  %zero = bf16[] constant(0)
  %products = bf16[32,64,128] parameter(4)
  %dot = bf16[32,128] {product}, {_named(shared)}
  %both = bf16[32,128] scatter(%dot, %places, %rows), to_apply=%sum
  ROOT %out = bf16[32,128] all-reduce(%both), replica_groups=[1,8]<=[8], to_apply=%sum, {_named("combine")}
}}
"""
    )


def _planned(tensor: str) -> PricedCollective:
    return PricedCollective(
        "activations",
        "forward",
        "all_reduce",
        ("tensor",),
        tensor,
        32 * 128 * 2,
        "bf16",
        1,
        1e-6,
        1e-6,
        "nvlink",
    )


_REDUCE = "reduce(%products, %zero), dimensions={1}, to_apply=%sum"
_DOT = "dot(%h, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
_CONVOLUTION = "convolution(%h, %w), dim_labels=bf_io->bf"  # a product of XLA for TPU


@pytest.mark.parametrize(
    ("tensor", "product", "status"),
    [
        ("shared_out", _DOT, "equivalent"),
        ("shared_out", _REDUCE, "equivalent"),
        ("shared_out", _CONVOLUTION, "equivalent"),
        ("w_out", _DOT, "missing"),
        ("w_out", _REDUCE, "missing"),
    ],
    ids=["added", "added by a reduction", "added on TPUs", "left out", "another reduction"],
)
def test_a_sum_is_equivalent_if_its_product_is_a_term_of_another_sum(
    tensor: str, product: str, status: str
) -> None:
    program = parse_hlo(_text(tensor, product))
    emitted = [on_mesh(one, MESH) for one in collectives(program)]
    rows = join_added(line_up([_planned("combine"), _planned("shared_out")], emitted), program)
    assert {row.tensor: row.status for row in rows} == {"combine": "match", "shared_out": status}


def _of_bias(tensor: str, status: str, num_bytes: int = 1536) -> TensorRow:
    gradient = PricedCollective(
        "gradients", "backward", "all_reduce", ("data",), tensor, num_bytes, "bf16", 1, 1e-6, 1e-6, "ici"
    )
    return TensorRow(tensor, "backward", (gradient,), (), status, "")


@pytest.mark.parametrize(
    ("parallel", "other", "num_bytes", "status"),
    [
        (True, "w_out_bias", 1536, "equivalent"),
        (False, "w_out_bias", 1536, "missing"),
        (True, "w_in_bias", 1536, "missing"),
        (True, "w_out_bias", 768, "missing"),
    ],
)
def test_equal_gradients_of_a_parallel_layer_are_summed_once(
    parallel: bool, other: str, num_bytes: int, status: str
) -> None:
    rows = [_of_bias("wo_bias", "missing"), _of_bias(other, "match", num_bytes)]
    assert [row.status for row in join_equal(rows, parallel=parallel)] == [status, "match"]
