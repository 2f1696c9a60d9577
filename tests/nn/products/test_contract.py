"""The gradients of a product, and the order in which devices add them up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of
from meshwright.nn.products.contract import local_product
from meshwright.nn.products.execute import apply_reshard
from meshwright.nn.start.device_mesh import device_mesh


@pytest.mark.parametrize("sums_last", [False, True])
def test_a_heads_gradient_may_wait_for_that_of_its_input(sums_last: bool) -> None:
    """With `sums_last`, both gradients pass one barrier, so that no sum begins before both exist."""
    layout = Layout.of(data=2, compute_dtype="f32")
    plan = contraction_of(layout, "unembed", "BTD,DV->BTV")
    random = np.random.default_rng(0)
    x, w = random.normal(size=(4, 3, 5)).astype(np.float32), random.normal(size=(5, 7)).astype(np.float32)

    def loss(x: Array, w: Array) -> Array:
        w = apply_reshard(plan.rhs_reshard, w)
        return jnp.sum(local_product(plan, jnp.float32, x, w, sums_last=sums_last) ** 2)

    mesh = device_mesh(layout, jax.devices()[:2])
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, P("data", None, None)), jax.device_put(w, P(None, None))
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
        traced = str(gradients.trace(*placed).jaxpr)
        d_x, d_w = gradients(*placed)
    assert ("optimization_barrier" in traced) == sums_last
    out = 2 * np.einsum("BTD,DV->BTV", x, w)
    np.testing.assert_allclose(d_x, np.einsum("BTV,DV->BTD", out, w), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(d_w, np.einsum("BTD,BTV->DV", x, out), rtol=1e-4, atol=1e-4)
