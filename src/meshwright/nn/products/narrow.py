"""Products in training of fp8 or int8, with scales for rows and columns or for tiles, of fp4, or of f16.

    rows    y[i, j] = s[i] t[j] sum_k x[i, k] w[k, j]              s[i] = max_k |x[i, k]| / largest
    tiles   y[i, j] = sum_b s[i, b] t[b, j / 128] sum_k x[i, k] w[k, j]      k of the 128 of block b
    fp4     y[i, j] = u v sum_b s[i, b] t[b, j / 16] sum_k x[i, k] w[k, j]   k of the 16 of block b

Of every product, forward and backward, each operand is scaled along what is summed over, by a device on its
own block: no scale travels. With rows a scale is of as many numbers as a device's share of the sum has. With
tiles it is of 128 numbers of an activation or a gradient, and of 128 x 128 of a weight (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2); the sums of 128 products are scaled and added in float32. Sums are float32
(of int8 int32). The largest number of fp8 (e4m3, Micikevicius et al., arXiv:2209.05433) is 448.

fp4 is NVFP4 (arXiv:2509.25149): numbers of e2m1, whose largest is 6, in blocks of 16 of an activation or a
gradient and 16 x 16 of a weight, with scales of e4m3 over one float32 scale (u, v) of the device's whole
operand. That one is a power of two, which float32 multiplies by exactly: so devices with other shares of an
operand round alike, but where a block's largest number is under 2^-13 of the operand's. Numbers are rounded
to the nearest; the paper's recipe has besides stochastic rounding of gradients, Hadamard transforms, and some
products that stay in bfloat16. GPUs from Blackwell on multiply blocks by cuDNN. On other chips what numbers
and scales of blocks stand for is multiplied in the type of activations, which holds it exactly.

What the backward pass keeps of an activation may be narrow as well (section 3.3.3 there): `Kept`, of whose
values and scales a product is made, and of which all that reads it has what is left after the rounding.

Operands of f16 have no scales: each is cast, and sums are float32. A number beyond 65,504 becomes infinite,
one under 6e-5 loses bits and one under 3e-8 is zero. The loss is a mean, so cotangents are about 1 over the
tokens of a microbatch: beyond some 16,000 of them they lose bits.

CPUs have no products of fp8: there its values, which the type of activations holds exactly, are multiplied in
that. Chips without units for a type do as their compiler does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshwright.layout.precision import EMULATED, FP4_BLOCK, TILE
from meshwright.nn.attention.flash import capability
from meshwright.nn.each_device import axes_of, each_device, of_cotangent, spec_of
from meshwright.nn.start.device_mesh import partition_spec, platform
from meshwright.notation.einsum import Contraction, Einsum

# Each with its largest number.
TYPES: dict[str, tuple[Any, float]] = {
    "fp8": (jnp.float8_e4m3fn, 448.0),
    "int8": (jnp.int8, 127.0),
    "fp4": (jnp.float4_e2m1fn, 6.0),
}
_WITH_FP4 = 10.0  # compute capability


class Rounded(NamedTuple):
    """An array in a narrow type, and the scales of its lines or tiles, all along its last dimension."""

    values: Array
    scales: Array


@dataclass(frozen=True)
class Kept:
    """An array as the backward pass has it, `rounded`. wide: that in the array's own type, to be read.

    The cotangent of `wide` is that of what was rounded.
    """

    wide: Array
    rounded: Rounded


def kept(x: Array, narrow: str, scales: str, name: str | None = None) -> Kept:
    """x as it is kept in the type `narrow`, each device's own block by itself.

    scales: of "rows", or of "tiles" along them. name: by which remat policies know the rounded array. Where
    they keep it nothing else of x is kept, since nothing reads x itself.
    """
    spec, dtype = spec_of(x), x.dtype
    # A scale for each device along what is split.
    of_rounded: Any = Rounded._make([spec, spec])

    def local(block: Array) -> Rounded:
        return _in_lines(block, narrow, scales)

    rounded = each_device(local, (spec,), of_rounded)(lax.stop_gradient(x))
    if name is not None:
        # By its bits: of floats that it keeps JAX rounds each as IEEE has such a type, which for e4m3 ends at
        # 240, with infinity beyond (`_insert_reduce_precision`, jax 0.10.2).
        bits = checkpoint_name(lax.bitcast_convert_type(rounded.values, jnp.uint8), name)
        values = lax.bitcast_convert_type(bits, rounded.values.dtype)
        rounded = Rounded(values, checkpoint_name(rounded.scales, name))

    def widened(_: Array, rounded: Rounded) -> Array:
        return each_device(lambda block: _widened(block, dtype), (of_rounded,), spec)(rounded)

    straight = jax.custom_vjp(widened)
    # Not by a call of `straight` itself, for which JAX would keep x.
    straight.defvjp(lambda x, rounded: (widened(x, rounded), None), lambda _, d: (d, None))
    return Kept(straight(x, rounded), rounded)


def wide(x: Array | Kept) -> Array:
    """The array to read of one that may be kept narrower."""
    return x.wide if isinstance(x, Kept) else x


def _in_lines(x: Array, narrow: str, scales: str) -> Rounded:
    """A block, with a scale for each row or each tile of one."""
    if scales == "rows":
        return Rounded(*rounded(x, (x.ndim - 1,), narrow))
    length = x.shape[-1]
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % TILE)])
    values, scale = rounded(jnp.reshape(filled, (*x.shape[:-1], -1, TILE)), (x.ndim,), narrow)
    return Rounded(jnp.reshape(values, filled.shape)[..., :length], scale[..., 0])


def _widened(rounded: Rounded, dtype: Any) -> Array:
    """What is left of a block that was rounded, in `dtype`."""
    values, scales = rounded
    if scales.shape[-1] > 1:
        scales = jnp.repeat(scales, TILE, axis=-1)[..., : values.shape[-1]]
    return (values.astype(jnp.float32) * scales).astype(dtype)


def narrow_product(
    plan: Contraction, dtype: Any, narrow: str, x: Array | Kept, w: Array, scales: str = "rows"
) -> Array:
    """`local_product` of operands in the type `narrow`, in `dtype`; cotangents have the operands' types.

    scales: of "rows" and columns, or of "tiles". Of an x that is Kept the product has the values and scales,
    and of those alone the backward pass makes what the gradient of w is of.
    """
    of_x, of_w, of_y = spec_of(wide(x)), spec_of(w), partition_spec(plan.product)
    forward_sum, x_sum, w_sum = map(str, (plan.einsum, plan.lhs_gradient.einsum, plan.rhs_gradient.einsum))
    multiplied, x_dtype = narrow_multiply(dtype, narrow, scales), wide(x).dtype
    read: Any = x.rounded if isinstance(x, Kept) else None
    of_read = jax.tree.map(lambda _: of_x, read)

    def local(x: Array | Rounded, w: Array) -> Array:
        return multiplied(forward_sum, x, w, True).astype(dtype)

    def local_backward(x: Array | Rounded, w: Array, d_y: Array) -> tuple[Array, Array]:
        x = _widened(x, x_dtype) if isinstance(x, Rounded) else x
        d_x = multiplied(x_sum, d_y, w, True).astype(x.dtype)
        d_w = multiplied(w_sum, x, d_y, False).astype(w.dtype)
        return _summed(d_x, of_x, (of_w, of_y)), _summed(d_w, of_w, (of_x, of_y))

    def forward(x: Array, read: Rounded | None, w: Array) -> tuple[Array, Any]:
        return product(x, read, w), (x if read is None else read, w)

    @jax.custom_vjp
    def product(x: Array, read: Rounded | None, w: Array) -> Array:
        operand, spec = (x, of_x) if read is None else (read, of_read)
        return each_device(local, (spec, of_w), of_y)(operand, w)

    def backward(saved: tuple[Any, Array], d_y: Array) -> tuple[Array, None, Array]:
        given = of_x if read is None else of_read, of_w, of_cotangent(of_y)
        taken = of_cotangent(of_x), of_cotangent(of_w)
        d_x, d_w = each_device(local_backward, given, taken)(*saved, d_y)
        return d_x, None, d_w

    product.defvjp(forward, backward)
    return product(wide(x), read, w)


def narrow_multiply(dtype: Any, narrow: str, scales: str = "rows") -> Callable[..., Array]:
    """The product in float32 of two blocks, by the letters of an einsum, that `narrow_product` makes.

    The first may be Rounded, along what is summed over.
    """

    def cast(spec: str, one: Array, other: Array, _: bool) -> Array:
        operands = one.astype(jnp.float16), other.astype(jnp.float16)
        return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)

    def multiply(spec: str, one: Array | Rounded, other: Array, is_weight: bool) -> Array:
        einsum = Einsum.parse(spec)
        if narrow == "fp4":
            assert not isinstance(one, Rounded), "nothing is kept in fp4"
            return _blocked_product(einsum, one, other, dtype, is_weight=is_weight)
        if scales == "tiles":
            return _tiled_product(einsum, one, other, narrow, dtype, is_weight=is_weight)
        return _product(einsum, one, other, narrow, dtype)

    return cast if narrow == "f16" else multiply


def as_multiplied(values: Array, narrow: str, dtype: Any) -> Array:
    """Values of the type `narrow` as products have them: in `dtype`, which holds it, where there are none."""
    if platform() != "cpu" or narrow != "fp8":
        return values
    with jax.named_scope(EMULATED):
        return values.astype(dtype)


def _product(einsum: Einsum, one: Array | Rounded, other: Array, narrow: str, dtype: Any) -> Array:
    """The product in float32 of two blocks, each scaled along what is summed over."""
    values, scales = zip(
        _scaled(one, einsum.lhs, einsum, narrow), _scaled(other, einsum.rhs, einsum, narrow), strict=True
    )
    values = tuple(as_multiplied(value, narrow, dtype) for value in values)
    sum_type = jnp.int32 if narrow == "int8" else jnp.float32
    summed = jnp.einsum(str(einsum), *values, preferred_element_type=sum_type).astype(jnp.float32)
    return summed * scales[0] * scales[1]


def _scaled(x: Array | Rounded, letters: str, einsum: Einsum, narrow: str) -> tuple[Array, Array]:
    """x in the narrow type, and its scales as they multiply the product."""
    along = tuple(dim for dim, letter in enumerate(letters) if letter in einsum.contracted)
    values, scale = x if isinstance(x, Rounded) else rounded(x, along, narrow)
    kept = [letter for letter in letters if letter not in einsum.contracted]
    sizes = dict(zip(letters, values.shape, strict=True))
    turned = lax.transpose(jnp.squeeze(scale, along), [kept.index(one) for one in einsum.out if one in kept])
    return values, jnp.reshape(turned, [sizes[one] if one in kept else 1 for one in einsum.out])


def rounded(x: Array, along: tuple[int, ...], narrow: str) -> tuple[Array, Array]:
    """x in the narrow type, and the scales of its lines or tiles, which have one number along them."""
    kind, largest = TYPES[narrow]
    wide = x.astype(jnp.float32)
    # Of zeros any scale will do.
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=along, keepdims=True), 1e-30) / largest
    values = wide / scale
    return (jnp.round(values) if narrow == "int8" else values).astype(kind), scale


def _tiled_product(
    einsum: Einsum, one: Array | Rounded, other: Array, narrow: str, dtype: Any, *, is_weight: bool
) -> Array:
    """`_product` with scales of tiles; is_weight: whether `other` is one, and has square tiles."""
    sum_type = jnp.int32 if narrow == "int8" else jnp.float32
    first = _tiles(one, einsum.lhs, einsum, narrow, square=False)
    second = _tiles(other, einsum.rhs, einsum, narrow, square=is_weight)

    def add(total: Array, block: Any) -> tuple[Array, None]:
        (x, s), (w, t) = block
        x, w = (as_multiplied(value, narrow, dtype) for value in (x, w))
        summed = _of_matrices(x, w, sum_type).astype(jnp.float32)
        return total + summed * s[:, :, None] * t[:, None, :], None

    rows, columns = first[0].shape[2], second[0].shape[2]
    nothing = jnp.zeros((first[0].shape[1], rows, columns), jnp.float32)
    total, _ = lax.scan(add, nothing, (first, second))
    shape = one.values.shape if isinstance(one, Rounded) else one.shape
    return _as_product(total, einsum, shape, other.shape)


def _blocked_product(einsum: Einsum, one: Array, other: Array, dtype: Any, *, is_weight: bool) -> Array:
    """`_product` of fp4; is_weight: whether `other` is one, and has square blocks."""
    first, scale = _in_blocks(_matrices(one, einsum.lhs, einsum), 1)
    second, of_other = _in_blocks(_matrices(other, einsum.rhs, einsum), FP4_BLOCK if is_weight else 1)
    if platform() == "gpu" and (capability() or 0) >= _WITH_FP4:
        operands = first.values, second.values, first.scales, second.scales
        y = jax.nn.scaled_matmul(*operands, preferred_element_type=jnp.float32)
    else:
        y = _of_matrices(_held(first, dtype), _held(second, dtype), jnp.float32)
    return _as_product(y * (scale * of_other), einsum, one.shape, other.shape)


def _held(blocks: Rounded, dtype: Any) -> Array:
    """What numbers of fp4 stand for, in `dtype`, which holds it: with its scale each has 6 bits."""
    with jax.named_scope(EMULATED):
        return blocks.values.astype(dtype) * jnp.repeat(blocks.scales, FP4_BLOCK, axis=-1).astype(dtype)


def _in_blocks(matrices: Array, high: int) -> tuple[Rounded, Array]:
    """matrices[e, r, k] in fp4, filled up along k, with scales of blocks of `high` by 16; that over these."""
    (kind, largest), (of_scales, most) = TYPES["fp4"], TYPES["fp8"]
    num, rows, _ = matrices.shape
    filled = _filled(matrices, high, FP4_BLOCK)
    blocks = jnp.reshape(filled, (num, filled.shape[1] // high, high, -1, FP4_BLOCK))
    # In their own type: XLA for GPU would write all magnitudes in float32. Of zeros any scale will do.
    magnitudes = jnp.max(jnp.abs(blocks), axis=(2, 4), keepdims=True).astype(jnp.float32)
    of_blocks = jnp.maximum(magnitudes, 1e-30) / largest
    _, exponent = jnp.frexp(jnp.max(of_blocks) / most)
    scale = jnp.ldexp(jnp.float32(1), exponent)
    least = float(jnp.finfo(of_scales).smallest_subnormal)
    scales = jnp.clip(of_blocks / scale, least, most).astype(of_scales)
    values = jnp.clip(blocks.astype(jnp.float32) / (scales.astype(jnp.float32) * scale), -largest, largest)
    # XLA for CPU rounds to bfloat16 first, and so 2.501 to 2 (jax 0.10.2).
    step = jnp.where(jnp.abs(values) < 2, 0.5, jnp.where(jnp.abs(values) < 4, 1.0, 2.0))
    values = jnp.reshape((jnp.round(values / step) * step).astype(kind), filled.shape)
    of_rows = jnp.broadcast_to(scales, (*blocks.shape[:4], 1))
    return Rounded(values[:, :rows], jnp.reshape(of_rows, (num, filled.shape[1], -1))[:, :rows]), scale


def _as_product(y: Array, einsum: Einsum, *shapes: Sequence[int]) -> Array:
    """A product[e, r, s] of `_matrices` of operands of these shapes, as the einsum has it."""
    sizes = dict(zip(einsum.lhs + einsum.rhs, (size for shape in shapes for size in shape), strict=True))
    made = _shared(einsum.lhs, einsum) + _free(einsum.lhs, einsum) + _free(einsum.rhs, einsum)
    return jnp.transpose(
        jnp.reshape(y, [sizes[letter] for letter in made]), [made.index(one) for one in einsum.out]
    )


def _tiles(
    x: Array | Rounded, letters: str, einsum: Einsum, narrow: str, *, square: bool
) -> tuple[Array, Array]:
    """(values[b, e, r, 128], scales[b, e, r]) of x as matrices [e, r, 128 b], filled up with zeros.

    e: letters of both operands and the product; r: of this operand and the product; b: blocks of the sum.
    """
    if isinstance(x, Rounded):
        values, scales = (_matrices(part, letters, einsum) for part in x)
        tiles = jnp.reshape(_filled(values, 1), (*values.shape[:2], -1, TILE))
        return jnp.moveaxis(tiles, 2, 0), jnp.moveaxis(scales, 2, 0)
    matrices, high = _matrices(x, letters, einsum), TILE if square else 1
    num, rows, _ = matrices.shape
    filled = _filled(matrices, high)
    tiles = jnp.reshape(filled, (num, filled.shape[1] // high, high, -1, TILE))
    values, scale = rounded(tiles, (2, 4), narrow)
    of_rows = jnp.broadcast_to(scale, (*tiles.shape[:4], 1))
    values, of_rows = (
        jnp.reshape(jnp.moveaxis(found, 3, 0), (tiles.shape[3], num, -1, found.shape[-1]))[:, :, :rows]
        for found in (values, of_rows)
    )
    return values, of_rows[..., 0]


def _of_matrices(x: Array, w: Array, sum_type: Any) -> Array:
    """y[e, r, s] of x[e, r, k] and w[e, s, k].

    Of one as such: what XLA makes of a product of one in a batch has no name (jax 0.10.2).
    """
    if len(x) == 1:
        return jnp.einsum("rk,sk->rs", x[0], w[0], preferred_element_type=sum_type)[None]
    return jnp.einsum("erk,esk->ers", x, w, preferred_element_type=sum_type)


def _matrices(x: Array, letters: str, einsum: Einsum) -> Array:
    """x as matrices [e, r, length of the sum]."""
    sizes = dict(zip(letters, x.shape, strict=True))
    parts = _shared(letters, einsum), _free(letters, einsum), einsum.contracted
    ordered = jnp.transpose(x, [letters.index(letter) for part in parts for letter in part])
    return jnp.reshape(ordered, [prod(sizes[letter] for letter in part) for part in parts])


def _filled(matrices: Array, high: int, wide: int = TILE) -> Array:
    """Matrices [e, r, length], filled up with zeros to whole tiles of `high` by `wide`."""
    return jnp.pad(matrices, ((0, 0), (0, -matrices.shape[1] % high), (0, -matrices.shape[2] % wide)))


def _shared(letters: str, einsum: Einsum) -> str:
    """The letters of an operand that the other and the product have, too."""
    return "".join(one for one in letters if one in einsum.lhs and one in einsum.rhs and one in einsum.out)


def _free(letters: str, einsum: Einsum) -> str:
    """The letters of an operand that the other has not."""
    return "".join(one for one in letters if not (one in einsum.lhs and one in einsum.rhs))


def _summed(cotangent: Array, spec: PartitionSpec, others: tuple[PartitionSpec, ...]) -> Array:
    """The sum over axes that split the others and not this operand, but for those it is partial over."""
    known = {*_axes(spec), *spec.reduced, *spec.unreduced}
    axes = tuple(dict.fromkeys(axis for other in others for axis in _axes(other) if axis not in known))
    return lax.psum(cotangent, axes) if axes else cotangent


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for entry in spec.partitions for axis in axes_of(entry)]
