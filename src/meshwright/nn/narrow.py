"""Products in training whose operands are fp8 or int8, with a scale for each row and each column.

    y[i, j] = s[i] t[j] sum_k x[i, k] w[k, j]      s[i] = max_k |x[i, k]| / largest

Of every product, forward and backward, each operand is scaled along what is summed over, by a device on its
own block: no scale travels, and a scale is of as many numbers as a device's share of the sum has. Sums are
float32 (of int8 int32). The largest number of fp8 (e4m3, Micikevicius et al., arXiv:2209.05433) is 448.

CPUs have no products of fp8: there its values, which the type of activations holds exactly, are multiplied in
that. Chips without units for a type do as their compiler does.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from meshwright.nn.each_device import axes_of, each_device, of_cotangent, spec_of
from meshwright.nn.mesh import partition_spec, platform
from meshwright.notation.einsum import Contraction, Einsum

_TYPES: dict[str, tuple[Any, float]] = {"fp8": (jnp.float8_e4m3fn, 448.0), "int8": (jnp.int8, 127.0)}


def narrow_product(plan: Contraction, dtype: Any, narrow: str, x: Array, w: Array) -> Array:
    """`local_product` of operands in the type `narrow`, in `dtype`; cotangents have the operands' types."""
    of_x, of_w, of_y = spec_of(x), spec_of(w), partition_spec(plan.product)
    emulated = dtype if platform() == "cpu" and narrow == "fp8" else None
    forward_sum, x_sum, w_sum = plan.einsum, plan.lhs_gradient.einsum, plan.rhs_gradient.einsum

    def local(x: Array, w: Array) -> Array:
        return _product(forward_sum, x, w, narrow, emulated).astype(dtype)

    def local_backward(x: Array, w: Array, d_y: Array) -> tuple[Array, Array]:
        d_x = _product(x_sum, d_y, w, narrow, emulated).astype(x.dtype)
        d_w = _product(w_sum, x, d_y, narrow, emulated).astype(w.dtype)
        return _summed(d_x, of_x, (of_w, of_y)), _summed(d_w, of_w, (of_x, of_y))

    @jax.custom_vjp
    def product(x: Array, w: Array) -> Array:
        return each_device(local, (of_x, of_w), of_y)(x, w)

    def backward(saved: tuple[Array, Array], d_y: Array) -> tuple[Array, Array]:
        taken = of_cotangent(of_x), of_cotangent(of_w)
        return each_device(local_backward, (of_x, of_w, of_cotangent(of_y)), taken)(*saved, d_y)

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)
    return product(x, w)


def _product(einsum: Einsum, one: Array, other: Array, narrow: str, emulated: Any) -> Array:
    """The product in float32 of two blocks, each scaled along what is summed over."""
    values, scales = zip(
        _scaled(one, einsum.lhs, einsum, narrow), _scaled(other, einsum.rhs, einsum, narrow), strict=True
    )
    if emulated is not None:
        values = tuple(value.astype(emulated) for value in values)
    sum_type = jnp.int32 if narrow == "int8" else jnp.float32
    summed = jnp.einsum(str(einsum), *values, preferred_element_type=sum_type).astype(jnp.float32)
    return summed * scales[0] * scales[1]


def _scaled(x: Array, letters: str, einsum: Einsum, narrow: str) -> tuple[Array, Array]:
    """x in the narrow type, and its scales as they multiply the product."""
    kind, largest = _TYPES[narrow]
    wide = x.astype(jnp.float32)
    along = tuple(dim for dim, letter in enumerate(letters) if letter in einsum.contracted)
    # Of a row of zeros any scale will do.
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=along, keepdims=True), 1e-30) / largest
    values = wide / scale
    values = (jnp.round(values) if narrow == "int8" else values).astype(kind)
    kept = [letter for letter in letters if letter not in einsum.contracted]
    sizes = dict(zip(letters, x.shape, strict=True))
    turned = lax.transpose(jnp.squeeze(scale, along), [kept.index(one) for one in einsum.out if one in kept])
    return values, jnp.reshape(turned, [sizes[one] if one in kept else 1 for one in einsum.out])


def _summed(cotangent: Array, spec: PartitionSpec, others: tuple[PartitionSpec, ...]) -> Array:
    """The sum over axes that split the others and not this operand, but for those it is partial over."""
    known = {*_axes(spec), *spec.reduced, *spec.unreduced}
    axes = tuple(dict.fromkeys(axis for other in others for axis in _axes(other) if axis not in known))
    return lax.psum(cotangent, axes) if axes else cotangent


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for entry in spec.partitions for axis in axes_of(entry)]
