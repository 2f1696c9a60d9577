"""The collectives of loss and gradients under each layout, counted by hand and pinned."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from tests.nn.one_device import Step
from tests.nn.small_models import TINY

from meshwright.layout import Layout
from meshwright.layout.moves.attention import token_sharding
from meshwright.nn.embedding import embed
from meshwright.nn.start.device_mesh import array_type, device_mesh
from meshwright.testing import assert_collectives

pytestmark = pytest.mark.sampled(4)

L = TINY.num_layers
# wq, wk, wv, wo, w_gate, w_in, w_out of a layer, and both tables; two norms of a layer, and the last.
MATRICES, TABLES, NORMS = 7 * L, 2, 2 * L + 1


def expected(layout: Layout) -> Counter[str]:
    """Each weight is gathered over fsdp forward and again backward, a table once; gradients are summed."""
    found = Counter({"AllGather_fsdp": 2 * MATRICES + TABLES, "ReduceScatter_fsdp": MATRICES + TABLES})
    if layout.mesh.sizes["fsdp"] == 1:
        found.clear()
    found += _sums(layout, MATRICES + TABLES, "data", "context") + _sums(layout, NORMS, "data", "fsdp")
    found += _sums(layout, NORMS, "context", *(["tensor"] if layout.word("sequence_parallel") else []))
    return found + _of_tensor(layout) + _of_context(layout)


def _sums(layout: Layout, count: int, *axes: str) -> Counter[str]:
    """So many gradients, summed over those of `axes` that have devices."""
    over = ",".join(axis for axis in axes if layout.mesh.sizes[axis] > 1)
    name = f"AllReduce_{{{over}}}" if "," in over else f"AllReduce_{over}"
    return Counter({name: count} if over else {})


def _of_tensor(layout: Layout) -> Counter[str]:
    """Four sums a layer, the table's rows, the input of the unembedding; three of the loss's softmax.

    remat=full computes wo's sum again, and not that of w_out, which only the next layer needs. With
    sequence parallelism each sum is a scatter and a gather; the inputs of wq, wk, wv and of w_gate, w_in
    are gathered again backward.
    """
    if layout.mesh.sizes["tensor"] == 1:
        return Counter()
    sums, again = 4 * L + 2, L if layout.schedule.remat == "full" else 0
    if not layout.word("sequence_parallel"):
        return Counter({"AllReduce_tensor": sums + again + 3})
    return Counter(
        {"AllReduce_tensor": 3, "AllGather_tensor": 6 * L + 2, "ReduceScatter_tensor": sums + again}
    )


def _of_context(layout: Layout) -> Counter[str]:
    """Keys and values gathered forward and again backward, their gradients scattered."""
    if layout.mesh.sizes["context"] == 1:
        return Counter()
    return Counter({"AllGather_context": 4 * L, "ReduceScatter_context": 2 * L})


@pytest.mark.parametrize(
    "text",
    [
        "data=2,fsdp=2,tensor=2",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in (
                "context=2,tensor=2,fsdp=2,sequence_parallel=true,remat=full",
                "fsdp=8",
                "tensor=4,remat=full",
                "data=8",
                "data=8,remat=full",
                "tensor=4",
                "context=8",
                "tensor=4,sequence_parallel=true",
                "tensor=4,sequence_parallel=true,remat=full",
                "fsdp=4,tensor=2,sequence_parallel=true,remat=matmuls",
                "context=4,fsdp=2,remat=matmuls",
                "data=2,fsdp=4,remat=matmuls",
                "data=4,tensor=2,sequence_parallel=true",
                "fsdp=2,tensor=4,remat=full",
                "fsdp=2,tensor=4,sequence_parallel=true",
                "data=2,context=4",
                "context=2,tensor=4,remat=matmuls",
                "data=2,context=2,tensor=2,sequence_parallel=true",
                "data=2,fsdp=2,context=2,remat=full",
            )
        ),
    ],
)
def test_the_collectives_of_a_layout(text: str) -> None:
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    step = Step(TINY, layout)
    with jax.set_mesh(step.mesh):
        assert_collectives(step.run, step.params, *step.batch, expected=expected(layout))


@pytest.mark.parametrize("text", ["data=2,fsdp=4", "data=2,fsdp=2,tensor=2"])
def test_the_tables_gradient_is_scattered_before_its_shares_are_summed(text: str) -> None:
    """As JAX writes it: the sum over data is of D / fsdp, which is what crosses between slices."""
    layout = Layout.parse(text)
    mesh, sizes = device_mesh(layout), {"V": 64, "D": 32, "B": 8, "T": 16}
    table = array_type(layout.weight("embed", "VD"), mesh, sizes, "float32")
    ids = array_type(token_sharding(layout, "tokens"), mesh, sizes, "int32")

    def gradient(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.grad(lambda table: jnp.square(embed(ids, table, layout)).sum())(table)

    with jax.set_mesh(mesh):
        written = jax.jit(gradient).lower(table, ids).as_text()
    sums = re.findall(r'stablehlo\.(all_reduce|reduce_scatter)".*?\) : \(tensor<([^>]*)>\)', written, re.S)
    rows, share = 64 // layout.tensor, 32 // layout.fsdp
    assert sums[-2:] == [
        ("reduce_scatter", f"{layout.fsdp}x{rows}x{share}xf32"),
        ("all_reduce", f"{rows}x{share}xf32"),
    ]
