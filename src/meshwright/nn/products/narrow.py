"""Products in training of operands in a narrow type, with scales of lines, tiles or blocks, or without.

    rows    y[i, j] = s[i] t[j] sum_k x[i, k] w[k, j]                s[i] = max_k |x[i, k]| / largest
    tiles   y[i, j] = sum_b s[i, b] t[b, j / 128] sum_k x[i, k] w[k, j]       k in the 128 of block b
    blocks  y[i, j] = u v sum_b s[i, b] t[b, j / 16] sum_k x[i, k] w[k, j]    k in the 16 of block b

In every product, forward and backward, a device scales its block of each operand along the summed dimension:
no scale is sent. Sums are float32, of integers int32. With rows, the numbers of a device's share of the sum
have one scale. With tiles, 128 numbers of an activation or a gradient have one, and 128 x 128 of a weight
(DeepSeek-V3, arXiv:2412.19437, section 3.3.2); the sums of 128 products are scaled and added in float32.

Types with scales of blocks say in their record (dtypes/) how long a block is, whether a weight's blocks are
square, and the scales' type. NVFP4 (arXiv:2509.25149) has a float32 scale (u, v) over all scales
of a device's operand. It is a power of two here, which float32 multiplies by exactly: devices with different
shares of an operand round to the same numbers, unless a block's largest number is under 2^-13 of the
operand's. Numbers are rounded to the nearest; the paper also has stochastic rounding of gradients, Hadamard
transforms, and some products in bfloat16. GPUs with units for the type multiply blocks by cuDNN. Other chips
multiply each number by its scale and take the product in the type of activations, which holds it exactly.

The copy of an activation for the backward pass may be narrow too (DeepSeek-V3, section 3.3.3): a `Kept` has
the values and scales that products take, and the rounded numbers that other operations read.

Operands of f16 have no scales: each is cast, and sums are float32. A number beyond 65,504 becomes infinite,
one under 6e-5 loses bits and one under 3e-8 is zero. The loss is a mean, so cotangents are about 1 over the
tokens of a microbatch: beyond some 16,000 of them they lose bits.

If a chip's compiler has no products of a type (`emulated_on` in its record), its values are multiplied in the
type of activations, which holds them exactly. Otherwise chips without units do as their compiler does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshwright.dtypes import EMULATED, TILE, NumberType, Scales, number_type
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.attention.flash import capability
from meshwright.nn.each_device import axes_of, each_device, of_cotangent, spec_of
from meshwright.nn.start.device_mesh import partition_spec, platform
from meshwright.notation.einsum import Contraction, Einsum


class Rounded(NamedTuple):
    """An array in a narrow type, and the scales of its lines, tiles or blocks along its last dimension."""

    values: Array
    scales: Array


@dataclass(frozen=True)
class Kept:
    """An array as the backward pass keeps it.

    rounded: values and scales. wide: the rounded numbers in the array's type, for all other reads; its
    cotangent is the array's.
    """

    wide: Array
    rounded: Rounded


def kept(x: Array, narrow: str, scales: str, name: str | None = None) -> Kept:
    """Round x to the type `narrow` for the backward pass, each device its own block.

    scales: of "rows", or of "tiles" along them. name: the rounded array's name in remat policies. If they
    keep it, they keep nothing more of x, since nothing reads x itself.
    """
    spec, dtype = spec_of(x), x.dtype
    # Each device has scales of its own blocks along split dimensions.
    of_rounded: Any = Rounded._make([spec, spec])

    def local(block: Array) -> Rounded:
        return _in_lines(block, narrow, scales)

    rounded = each_device(local, (spec,), of_rounded)(lax.stop_gradient(x))
    if name is not None:
        # As bits: JAX rounds floats that it keeps to IEEE's form of their type, whose e4m3 ends at 240 and
        # has infinities (`_insert_reduce_precision`, jax 0.10.2).
        bits = checkpoint_name(lax.bitcast_convert_type(rounded.values, jnp.uint8), name)
        values = lax.bitcast_convert_type(bits, rounded.values.dtype)
        rounded = Rounded(values, checkpoint_name(rounded.scales, name))

    def widened(_: Array, rounded: Rounded) -> Array:
        return each_device(lambda block: _widened(block, dtype), (of_rounded,), spec)(rounded)

    straight = jax.custom_vjp(widened)
    # `widened`, since JAX would keep x for a call of `straight`.
    straight.defvjp(lambda x, rounded: (widened(x, rounded), None), lambda _, d: (d, None))
    return Kept(straight(x, rounded), rounded)


def wide(x: Array | Kept) -> Array:
    """The array to read, if x may be kept narrower."""
    return x.wide if isinstance(x, Kept) else x


def _in_lines(x: Array, narrow: str, scales: str) -> Rounded:
    """Round a block, with a scale for each row or each tile of a row."""
    if scales == "rows":
        return Rounded(*quantised_lines(x, (x.ndim - 1,), narrow))
    length = x.shape[-1]
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % TILE)])
    values, scale = quantised_lines(jnp.reshape(filled, (*x.shape[:-1], -1, TILE)), (x.ndim,), narrow)
    return Rounded(jnp.reshape(values, filled.shape)[..., :length], scale[..., 0])


def _widened(rounded: Rounded, dtype: DTypeLike) -> Array:
    """The numbers of a rounded block in `dtype`."""
    values, scales = rounded
    if scales.shape[-1] > 1:
        scales = jnp.repeat(scales, TILE, axis=-1)[..., : values.shape[-1]]
    return (values.astype(jnp.float32) * scales).astype(dtype)


def narrow_product(
    plan: Contraction, dtype: DTypeLike, narrow: str, x: Array | Kept, w: Array, scales: str = "rows"
) -> Array:
    """`local_product` of operands in the type `narrow`, in `dtype`; cotangents have the operands' types.

    scales: of "rows" and columns, or of "tiles". If x is Kept, the product takes its values and scales, and
    the backward pass computes the gradient of w from them.
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


def narrow_multiply(dtype: DTypeLike, narrow: str, scales: str = "rows") -> Callable[..., Array]:
    """The product in float32 of two blocks, by the letters of an einsum, as in `narrow_product`.

    The first may be Rounded, along the summed dimension.
    """
    record = number_type(narrow)

    def cast(spec: str, lhs: Array, rhs: Array, _: bool) -> Array:
        operands = lhs.astype(jax_dtype(narrow)), rhs.astype(jax_dtype(narrow))
        return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)

    def multiply(spec: str, lhs: Array | Rounded, rhs: Array, is_weight: bool) -> Array:
        einsum = Einsum.parse(spec)
        if record.is_blocked:
            assert not isinstance(lhs, Rounded), "activations are kept with scales of lines"
            return _blocked_product(einsum, lhs, rhs, record, dtype, is_weight=is_weight)
        if scales == "tiles":
            return _tiled_product(einsum, lhs, rhs, narrow, dtype, is_weight=is_weight)
        return _product(einsum, lhs, rhs, narrow, dtype)

    return multiply if record.scales else cast


def as_multiplied(values: Array, narrow: str, dtype: DTypeLike) -> Array:
    """Values of the type `narrow` as operands of a product: in the wider `dtype` if they are emulated."""
    if not platform().emulates(narrow):
        return values
    with jax.named_scope(EMULATED):
        return values.astype(dtype)


def _product(einsum: Einsum, lhs: Array | Rounded, rhs: Array, narrow: str, dtype: DTypeLike) -> Array:
    """The product in float32 of two blocks, each scaled along its summed dimensions."""
    values, scales = zip(
        _scaled(lhs, einsum.lhs, einsum, narrow), _scaled(rhs, einsum.rhs, einsum, narrow), strict=True
    )
    values = tuple(as_multiplied(value, narrow, dtype) for value in values)
    summed = jnp.einsum(str(einsum), *values, preferred_element_type=_sum_type(narrow)).astype(jnp.float32)
    return summed * scales[0] * scales[1]


def _scaled(x: Array | Rounded, letters: str, einsum: Einsum, narrow: str) -> tuple[Array, Array]:
    """x in the narrow type, and its scales as they multiply the product."""
    along = tuple(dim for dim, letter in enumerate(letters) if letter in einsum.contracted)
    values, scale = x if isinstance(x, Rounded) else quantised_lines(x, along, narrow)
    kept = [letter for letter in letters if letter not in einsum.contracted]
    sizes = dict(zip(letters, values.shape, strict=True))
    turned = lax.transpose(jnp.squeeze(scale, along), [kept.index(one) for one in einsum.out if one in kept])
    return values, jnp.reshape(turned, [sizes[one] if one in kept else 1 for one in einsum.out])


def _sum_type(narrow: str) -> Any:
    return jnp.int32 if number_type(narrow).is_integer else jnp.float32


def quantised_lines(x: Array, along: tuple[int, ...], narrow: str) -> tuple[Array, Array]:
    """x in the narrow type, and the scales of its lines or tiles, with size 1 along these dimensions."""
    record, wide = number_type(narrow), x.astype(jnp.float32)
    # Zeros may have any scale.
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=along, keepdims=True), 1e-30) / record.largest
    values = wide / scale
    return (jnp.round(values) if record.is_integer else values).astype(jax_dtype(narrow)), scale


def _tiled_product(
    einsum: Einsum, lhs: Array | Rounded, rhs: Array, narrow: str, dtype: Any, *, is_weight: bool
) -> Array:
    """`_product` with scales of tiles. is_weight: `other` is a weight, with square tiles."""
    first = _tiles(lhs, einsum.lhs, einsum, narrow, square=False)
    second = _tiles(rhs, einsum.rhs, einsum, narrow, square=is_weight)

    def add(total: Array, block: Any) -> tuple[Array, None]:
        (x, s), (w, t) = block
        x, w = (as_multiplied(value, narrow, dtype) for value in (x, w))
        summed = _of_matrices(x, w, _sum_type(narrow)).astype(jnp.float32)
        return total + summed * s[:, :, None] * t[:, None, :], None

    rows, columns = first[0].shape[2], second[0].shape[2]
    nothing = jnp.zeros((first[0].shape[1], rows, columns), jnp.float32)
    total, _ = lax.scan(add, nothing, (first, second))
    shape = lhs.values.shape if isinstance(lhs, Rounded) else lhs.shape
    return _as_product(total, einsum, shape, rhs.shape)


def _blocked_product(
    einsum: Einsum, lhs: Array, rhs: Array, record: NumberType, dtype: DTypeLike, *, is_weight: bool
) -> Array:
    """`_product` with scales of blocks. is_weight: `other` is a weight, whose blocks may be square."""
    assert record.scales is not None and record.scales.block is not None, "the type has blocks"
    high = record.scales.block if is_weight and record.scales.square else 1
    first, scale = _in_blocks(_matrices(lhs, einsum.lhs, einsum), record, 1)
    second, of_other = _in_blocks(_matrices(rhs, einsum.rhs, einsum), record, high)
    if platform().scaled_matmul and (capability() or 0) >= (record.capability or inf):
        operands = first.values, second.values, first.scales, second.scales
        y = jax.nn.scaled_matmul(*operands, preferred_element_type=jnp.float32)
    else:
        y = _of_matrices(_scaled_up(first, dtype), _scaled_up(second, dtype), jnp.float32)
    return _as_product(y * (scale * of_other), einsum, lhs.shape, rhs.shape)


def _scaled_up(blocks: Rounded, dtype: DTypeLike) -> Array:
    """Each number times the scale of its block, in `dtype`, which holds that exactly."""
    with jax.named_scope(EMULATED):
        size = blocks.values.shape[-1] // blocks.scales.shape[-1]
        return blocks.values.astype(dtype) * jnp.repeat(blocks.scales, size, axis=-1).astype(dtype)


def _in_blocks(matrices: Array, record: NumberType, high: int) -> tuple[Rounded, Array]:
    """Matrices[e, r, k] rounded in blocks of `high` rows, padded along k, and the scale of all scales."""
    assert record.scales is not None and record.scales.block is not None, "the type has blocks"
    block, largest = record.scales.block, record.largest
    num, rows, _ = matrices.shape
    filled = _filled(matrices, high, block)
    blocks = jnp.reshape(filled, (num, filled.shape[1] // high, high, -1, block))
    # In their own type: XLA for GPU would write all magnitudes in float32. Zeros may have any scale.
    magnitudes = jnp.max(jnp.abs(blocks), axis=(2, 4), keepdims=True).astype(jnp.float32)
    scales, scale = _block_scales(jnp.maximum(magnitudes, 1e-30) / largest, record.scales)
    values = jnp.clip(blocks.astype(jnp.float32) / (scales.astype(jnp.float32) * scale), -largest, largest)
    if record.bits == 4:
        # XLA for CPU rounds e2m1 to bfloat16 first, and so 2.501 to 2 (jax 0.10.2).
        step = jnp.where(jnp.abs(values) < 2, 0.5, jnp.where(jnp.abs(values) < 4, 1.0, 2.0))
        values = jnp.round(values / step) * step
    values = jnp.reshape(values.astype(jax_dtype(record.name)), filled.shape)
    of_rows = jnp.broadcast_to(scales, (*blocks.shape[:4], 1))
    return Rounded(values[:, :rows], jnp.reshape(of_rows, (num, filled.shape[1], -1))[:, :rows]), scale


def _block_scales(wanted: Array, scales: Scales) -> tuple[Array, Array]:
    """Scales of blocks in their type, from float32, and the scale over all of them.

    With a global scale they are rounded to the nearest. Otherwise they are powers of two, rounded up so that
    no number overflows (Mishra et al., arXiv:2506.08027).
    """
    kind = jax_dtype(scales.dtype)
    if not scales.has_global:
        mantissa, exponent = jnp.frexp(wanted)
        # float32 and bfloat16 have no smaller normal numbers than 2^-126.
        exponent = jnp.clip(exponent - (mantissa == 0.5), -126, 127)
        return jnp.ldexp(jnp.float32(1), exponent).astype(kind), jnp.float32(1)
    most = number_type(scales.dtype).largest
    _, exponent = jnp.frexp(jnp.max(wanted) / most)
    scale = jnp.ldexp(jnp.float32(1), exponent)
    least = float(jnp.finfo(kind).smallest_subnormal)
    return jnp.clip(wanted / scale, least, most).astype(kind), scale


def _as_product(y: Array, einsum: Einsum, *shapes: Sequence[int]) -> Array:
    """A product[e, r, s] of `_matrices` in the einsum's order. shapes: of the operands."""
    sizes = dict(zip(einsum.lhs + einsum.rhs, (size for shape in shapes for size in shape), strict=True))
    made = _shared(einsum.lhs, einsum) + _free(einsum.lhs, einsum) + _free(einsum.rhs, einsum)
    return jnp.transpose(
        jnp.reshape(y, [sizes[letter] for letter in made]), [made.index(one) for one in einsum.out]
    )


def _tiles(
    x: Array | Rounded, letters: str, einsum: Einsum, narrow: str, *, square: bool
) -> tuple[Array, Array]:
    """(values[b, e, r, 128], scales[b, e, r]) of x as matrices [e, r, 128 b], filled up with zeros.

    e: letters of both operands and the product. r: of this operand and the product. b: blocks of the sum.
    """
    if isinstance(x, Rounded):
        values, scales = (_matrices(part, letters, einsum) for part in x)
        tiles = jnp.reshape(_filled(values, 1), (*values.shape[:2], -1, TILE))
        return jnp.moveaxis(tiles, 2, 0), jnp.moveaxis(scales, 2, 0)
    matrices, high = _matrices(x, letters, einsum), TILE if square else 1
    num, rows, _ = matrices.shape
    filled = _filled(matrices, high)
    tiles = jnp.reshape(filled, (num, filled.shape[1] // high, high, -1, TILE))
    values, scale = quantised_lines(tiles, (2, 4), narrow)
    of_rows = jnp.broadcast_to(scale, (*tiles.shape[:4], 1))
    values, of_rows = (
        jnp.reshape(jnp.moveaxis(part, 3, 0), (tiles.shape[3], num, -1, part.shape[-1]))[:, :, :rows]
        for part in (values, of_rows)
    )
    return values, of_rows[..., 0]


def _of_matrices(x: Array, w: Array, sum_type: DTypeLike) -> Array:
    """y[e, r, s] of x[e, r, k] and w[e, s, k]."""
    # XLA drops the name of a product with a batch dimension of 1 (jax 0.10.2).
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
    """The letters of an operand that are not in the other."""
    return "".join(one for one in letters if not (one in einsum.lhs and one in einsum.rhs))


def _summed(cotangent: Array, spec: PartitionSpec, others: tuple[PartitionSpec, ...]) -> Array:
    """Sum a cotangent over axes that split the other operands only; not over axes it is partial over."""
    known = {*_axes(spec), *spec.reduced, *spec.unreduced}
    axes = tuple(dict.fromkeys(axis for other in others for axis in _axes(other) if axis not in known))
    return lax.psum(cotangent, axes) if axes else cotangent


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for entry in spec.partitions for axis in axes_of(entry)]
