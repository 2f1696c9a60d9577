"""A contraction and both its gradients, run as the algebra derives them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.nn.mesh import partition_spec
from meshwright.notation.einsum import Contraction


def local_product(plan: Contraction, dtype: Any, x: Array, w: Array) -> Array:
    """The product of the operands as computed on, `plan.product`: partial sums stay partial.

    The backward pass runs `plan.lhs_gradient` and `plan.rhs_gradient` in their own order of operands.
    JAX's transpose rule would write dW as (dy, x), whose transposed, strided copies of dy took XLA:CPU
    a third of a training step (demo model, f32, data=8: 2.90 s against 1.90 s). The product is computed and
    given in `dtype`; the cotangent of w has w's own type, which may be wider.
    """

    @jax.custom_vjp
    def product(x: Array, w: Array) -> Array:
        return local_einsum(plan, x, w.astype(dtype), dtype)

    def forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
        return product(x, w), (x, w)

    def backward(saved: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
        x, w = saved
        d_x = local_einsum(plan.lhs_gradient, d_out, w.astype(dtype), dtype)
        return d_x, local_einsum(plan.rhs_gradient, x, d_out, w.dtype)

    product.defvjp(forward, backward)
    return product(x, w)


def local_einsum(plan: Contraction, lhs: Array, rhs: Array, dtype: Any) -> Array:
    """`plan.product` of operands as computed on, for JAX to differentiate by its own rules."""
    return jnp.einsum(
        str(plan.einsum),
        lhs,
        rhs,
        out_sharding=partition_spec(plan.product),
        preferred_element_type=dtype,
    )
