"""A contraction and both its gradients, run as the algebra derives them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from meshwright.nn.start.device_mesh import partition_spec, platform
from meshwright.notation.einsum import Contraction

# The name of operands of weights' gradients: unless saved, all of the backward pass would be computed twice.
LATER = "later"


def local_product(
    plan: Contraction, dtype: Any, x: Array, w: Array, token: Array | None = None, *, sums_last: bool = False
) -> Array:
    """The product of the operands as computed on, `plan.product`: partial sums stay partial.

    The backward pass runs `plan.lhs_gradient` and `plan.rhs_gradient` in their own order of operands.
    JAX's transpose rule would write dW as (dy, x), whose transposed, strided copies of dy took XLA:CPU
    a third of a training step (demo model, f32, data=8: 2.90 s against 1.90 s). The product is computed and
    given in `dtype`; the cotangent of w has w's own type, which may be wider. token: 1, which multiplies that
    cotangent in such a way that it can be made later (nn/pipeline/stage_programs.py). sums_last: the
    cotangent of w is summed over devices after the cotangent of x exists, so that d_out is freed first.
    """

    @jax.custom_vjp
    def product(x: Array, w: Array, token: Array | None) -> Array:
        return local_einsum(plan, x, w.astype(dtype), dtype)

    def forward(x: Array, w: Array, token: Array | None) -> tuple[Array, Any]:
        # No `product`: recomputed with a token that is differentiated, it would differ with the token.
        return local_einsum(plan, x, w.astype(dtype), dtype), (x, w, token)

    def backward(saved: Any, d_out: Array) -> tuple[Array, Array, Array | None]:
        x, w, token = saved
        d_x = local_einsum(plan.lhs_gradient, d_out, w.astype(dtype), dtype)
        if token is not None:
            x, d_out = (checkpoint_name(one, LATER) for one in (x, d_out))
            x *= token.astype(x.dtype)
        d_w = local_einsum(plan.rhs_gradient, x, d_out, w.dtype)
        if sums_last:
            d_x, d_w = lax.optimization_barrier((d_x, d_w))
        return d_x, d_w, jax.tree.map(jnp.zeros_like, token)

    product.defvjp(forward, backward)
    return product(x, w, token)


def local_einsum(plan: Contraction, lhs: Array, rhs: Array, dtype: DTypeLike) -> Array:
    """`plan.product` of operands as computed on, for JAX to differentiate by its own rules."""
    product = jnp.einsum(
        str(plan.einsum),
        lhs,
        rhs,
        out_sharding=partition_spec(plan.product),
        preferred_element_type=_computed_in(plan, jnp.dtype(dtype)),
    )
    return product.astype(dtype)


def _computed_in(plan: Contraction, dtype: DTypeLike) -> Any:
    """The type for computing a product that is rounded to `dtype`.

    Partial sums are computed in bf16, as planned: XLA would otherwise add f32.
    """
    is_wide = platform().wide_products and dtype == jnp.bfloat16 and not plan.product.unreduced
    return jnp.float32 if is_wide else dtype
