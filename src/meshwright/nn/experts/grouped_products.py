"""Products of experts' rows, block by block: each row with the weights of its expert only.

    d[1, C, D] . w[E, D, M]    a product of each block of rows with the weights of its expert

The loops over blocks end after the blocks in use (layout/grouped.py). A block is one product on every
platform: `lax.ragged_dot` multiplies all rows with all of a device's experts on CPUs and GPUs, and on TPUs
for the weights' gradients (jax 0.10.2). Elementwise operations after a product run in such a loop as well, so
that unused capacity costs only memory. Results of unused blocks are zeros or, on TPUs, any values
(`Platform.unfilled`): nothing reads them. If every expert has one block (`Blocks.least`), the forward pass
has no loop: all blocks are one product.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from meshwright.layout.grouped import Blocks
from meshwright.models.scopes import by_even_load
from meshwright.nn.each_device import (
    axes_of,
    each_device,
    own_copies,
    spec_of,
    unfilled_after,
    with_gradient,
    zeros_after,
)
from meshwright.nn.experts.dropless import Routes
from meshwright.nn.start.device_mesh import platform
from meshwright.notation.array import Axes
from meshwright.notation.einsum import Contraction

# (the letters of a product, its operands, whether the second is a weight) -> the product in float32
Multiply = Callable[[str, Array, Array, bool], Array]
FORWARD, OF_ROWS, OF_WEIGHTS = "CI,IO->CO", "CO,IO->CI", "CI,CO->IO"


def grouped_product(
    plan: Contraction, x: Array, w: Array, routes: Routes, multiply: Multiply | None = None
) -> Array:
    """y[1, C, O] of x[1, C, I] and w[E, I, O], each block of rows by the weights of its expert.

    Sums over the columns of an expert are left to the tokens, so each device has its own; sums over D are
    all-reduced. Cotangents of w are partial over the axes of its `reduced` type.
    """
    multiply, w = multiply or _product, own_copies(w)
    of_x, of_w = spec_of(x), spec_of(w)
    of_routes = spec_of(routes.experts), spec_of(routes.num_blocks)
    is_second = plan.einsum.contracted == "M"
    first, second = list[Any](of_w.partitions)[-2:]
    over_d = axes_of(second if is_second else first)
    out = PartitionSpec(of_x.partitions[0], None, second if is_second else None)
    split = {axis for entry in of_w.partitions for axis in axes_of(entry)}
    summed = tuple(axis for axis in axes_of(of_x.partitions[0]) if axis not in split)
    blocks = routes.blocks
    trips = by_even_load(blocks.even)

    def local(x: Array, w: Array, experts: Array, count: Array) -> Array:
        y = _forward(x, w[0], experts, count, blocks, scope=trips, multiply=multiply)
        return lax.psum(y, over_d) if over_d and not is_second else y

    def local_backward(x: Array, w: Array, experts: Array, count: Array, d_y: Array) -> tuple[Array, Array]:
        d_x = _of_rows(w[0], experts, count, d_y, scope=trips, multiply=multiply)
        d_w = _of_weights(x, w[0], experts, count, d_y, blocks=blocks, multiply=multiply)
        d_x = lax.psum(d_x, over_d) if over_d and is_second else d_x
        return d_x, (lax.psum(d_w, summed) if summed else d_w)[None]

    @jax.custom_vjp
    def product(x: Array, w: Array, experts: Array, count: Array) -> Array:
        return each_device(local, (of_x, of_w, *of_routes), out)(x, w, experts, count)

    def backward(saved: Any, d_y: Array) -> tuple[Array, Array, None, None]:
        given, taken = (of_x, of_w, *of_routes, out), (of_x, of_w)
        d_x, d_w = each_device(local_backward, given, taken)(*saved, d_y)
        return d_x, d_w, None, None

    product.defvjp(lambda *arrays: (product(*arrays), arrays), backward)
    return product(x, w, routes.experts, routes.num_blocks)


def read_product(
    plan: Contraction, x: Array, weight: Any, routes: Routes, multiply: Callable[[Array, Any], Array]
) -> Array:
    """The forward pass of `grouped_product` with a weight of one or several arrays, each with E first.

    multiply: the product of one block with its expert's arrays; no other weights are read.
    """
    specs = jax.tree.map(spec_of, weight)
    of_x, is_second = spec_of(x), plan.einsum.contracted == "M"
    # Weights are stored with summed dimensions last.
    _, second, first = jax.tree.leaves(specs)[0].partitions
    over_d = () if is_second else axes_of(first)
    out = PartitionSpec(of_x.partitions[0], None, second if is_second else None)

    def local(x: Array, weight: Any, experts: Array, count: Array) -> Array:
        blocks, owners = _blocks(x, experts), experts[0]

        def block_of(i: Array) -> Array:
            return multiply(blocks[i], jax.tree.map(lambda leaf: leaf[owners[i]], weight))

        if routes.blocks.least:
            y = jax.vmap(multiply)(blocks, weight)
        else:
            read = x, jax.tree.leaves(weight)[0]
            y = _looped(block_of, read, count[0], len(owners), by_even_load(routes.blocks.even))
        y = jnp.reshape(y, (1, -1, y.shape[-1]))
        return lax.psum(y, over_d) if over_d else y

    given = of_x, specs, spec_of(routes.experts), spec_of(routes.num_blocks)
    return each_device(local, given, out)(x, weight, routes.experts, routes.num_blocks)


def biased_rows(y: Array, b: Array, routes: Routes, parts: Axes = ()) -> Array:
    """y[1, C, M] plus its expert's b[E, M] for each row; only the first device of `parts` adds it."""
    b = own_copies(b)
    spec, of_b = spec_of(y), spec_of(b)

    def local(y: Array, b: Array, experts: Array, count: Array) -> Array:
        adds = (lax.axis_index(parts) == 0).astype(b.dtype) if parts else jnp.asarray(1, b.dtype)
        # By block, so that the gradient sums each block's rows first: GPUs add rows to biases one by one
        # (gpt-oss of 4 layers, 65,536 rows, H200: 4.5 of 5.4 s of kernels).
        blocks, added = _blocks(y, experts), (adds * b[0])[experts[0]][:, None]
        # Cotangents of unused blocks may have any values.
        is_used = (jnp.arange(len(blocks), dtype=jnp.int32) < count[0])[:, None, None]
        return jnp.reshape(blocks + jnp.where(is_used, added, 0), y.shape)

    given = spec, of_b, spec_of(routes.experts), spec_of(routes.num_blocks)
    return with_gradient(local, given, spec, 2)(y, b, routes.experts, routes.num_blocks)


def computed_rows(compute: Callable[..., Array], routes: Routes, *rows: Array) -> Array:
    """`compute`, element by element, of the blocks of rows[1, C, M] in use; unused as in `_looped`."""
    spec, scope = spec_of(rows[0]), by_even_load(routes.blocks.even)
    of_count, num_blocks = spec_of(routes.num_blocks), routes.blocks.capacity

    def in_blocks(rows: tuple[Array, ...]) -> list[Array]:
        return [jnp.reshape(one, (num_blocks, -1, one.shape[-1])) for one in rows]

    def local(count: Array, *rows: Array) -> Array:
        if routes.blocks.least:
            return compute(*rows)
        blocks = in_blocks(rows)
        y = _looped(lambda i: compute(*(one[i] for one in blocks)), rows, count[0], num_blocks, scope)
        return jnp.reshape(y, rows[0].shape)

    def local_backward(count: Array, d_y: Array, *rows: Array) -> tuple[Array, ...]:
        blocks, d_blocks = in_blocks(rows), in_blocks((d_y,))[0]

        def block_of(i: Array) -> tuple[Array, ...]:
            return jax.vjp(compute, *(block[i] for block in blocks))[1](d_blocks[i])

        gradients = _looped(block_of, (d_y,), count[0], num_blocks, scope)
        return tuple(jnp.reshape(d, rows[0].shape) for d in gradients)

    @jax.custom_vjp
    def run(count: Array, *rows: Array) -> Array:
        return each_device(local, (of_count, *[spec] * len(rows)), spec)(count, *rows)

    def backward(saved: Any, d_y: Array) -> tuple[Array | None, ...]:
        count, *rows = saved
        specs = of_count, spec, *[spec] * len(rows)
        return None, *each_device(local_backward, specs, (spec,) * len(rows))(count, d_y, *rows)

    run.defvjp(lambda *arrays: (run(*arrays), arrays), backward)
    return run(routes.num_blocks, *rows)


def _looped(
    block_of: Callable[[Array], Any], read: Sequence[Array], count: Array, most: int, scope: str
) -> Any:
    """Results of `block_of` for the first `count` of `most` blocks, one after another.

    The others are zeros, or any values on platforms that fill no arrays (`unfilled_after`).

    read: arrays that the loop reads, one of them in no other loop (`zeros_after`).
    """
    types = jax.eval_shape(block_of, jnp.int32(0))
    leaves, structure = jax.tree.flatten(types)
    start = jax.tree.unflatten(
        structure,
        [unfilled_after(read, (most, *made.shape), made.dtype, at) for at, made in enumerate(leaves)],
    )

    def step(i: Array, state: object) -> Any:
        return jax.tree.map(
            lambda x, made: lax.dynamic_update_index_in_dim(x, made, i, 0), state, block_of(i)
        )

    with jax.named_scope(scope):
        return lax.fori_loop(0, count, step, start)


def _forward(
    x: Array, w: Array, experts: Array, count: Array, sizes: Blocks, *, scope: str, multiply: Multiply
) -> Array:
    """y[1, C, O] of one device's blocks."""
    blocks, owners = _blocks(x, experts), experts[0]

    def product(block: Array, weight: Array) -> Array:
        return multiply(FORWARD, block, weight.astype(x.dtype), True).astype(x.dtype)

    if sizes.least:
        y = jax.vmap(product)(blocks, w)
    else:
        y = _looped(lambda i: product(blocks[i], w[owners[i]]), (x, w), count[0], len(owners), scope)
    return jnp.reshape(y, (1, -1, w.shape[-1]))


def _of_rows(w: Array, experts: Array, count: Array, d_y: Array, *, scope: str, multiply: Multiply) -> Array:
    """d_x[1, C, I], the cotangent of one device's rows, of d_y[1, C, O]."""
    d_blocks, owners = _blocks(d_y, experts), experts[0]

    def block_of(i: Array) -> Array:
        return multiply(OF_ROWS, d_blocks[i], w[owners[i]].astype(d_y.dtype), True).astype(d_y.dtype)

    return jnp.reshape(_looped(block_of, (d_y, w), count[0], len(owners), scope), (1, -1, w.shape[1]))


def _of_weights(
    x: Array, w: Array, experts: Array, count: Array, d_y: Array, *, blocks: Blocks, multiply: Multiply
) -> Array:
    """d_w[E, I, O] of one device's experts, summed in float32.

    Some blocks of an expert are one product, since the sum is read and written for each. The last has fewer.
    """
    rows, d_rows, owners, together = _blocks(x, experts), _blocks(d_y, experts), experts[0], blocks.together
    is_there = jnp.arange(blocks.capacity, dtype=jnp.int32) < count[0]
    is_owner = owners[:, None] == jnp.arange(len(w), dtype=owners.dtype)[None]
    of_expert = jnp.sum(is_owner & is_there[:, None], axis=0, dtype=jnp.int32)
    ends, products = jnp.cumsum(of_expert), -(-of_expert // together)
    last = jnp.cumsum(products)

    def add_block(i: Array, d_w: Array) -> Array:
        owner = jnp.minimum(jnp.sum(i >= last), len(w) - 1)
        first = ends[owner] - of_expert[owner] + together * (i - last[owner] + products[owner])
        at = jnp.minimum(first, blocks.capacity - together)
        numbers = at + jnp.arange(together, dtype=jnp.int32)
        is_own = (numbers >= first) & (numbers < ends[owner])
        some = lax.dynamic_slice_in_dim(rows, at, together)
        d_some = lax.dynamic_slice_in_dim(d_rows, at, together)
        if together > 1:
            some = jnp.where(is_own[:, None, None], some, 0)
            # An unused block may have NaN, and zero times NaN is NaN.
            d_some = jnp.where(is_own[:, None, None], d_some, 0) if platform().unfilled else d_some
        flat, d_flat = (jnp.reshape(part, (-1, part.shape[-1])) for part in (some, d_some))
        return d_w.at[owner].add(multiply(OF_WEIGHTS, flat, d_flat, False))

    with jax.named_scope(by_even_load(blocks.sums)):
        return lax.fori_loop(0, last[-1], add_block, zeros_after((d_y, w), w.shape, jnp.float32)).astype(
            w.dtype
        )


def _blocks(rows: Array, experts: Array) -> Array:
    """[blocks, rows of a block, D] of one device's rows[1, C, D]."""
    return jnp.reshape(rows, (experts.shape[-1], -1, rows.shape[-1]))


def _product(spec: str, first: Array, other: Array, _: bool) -> Array:
    """The product, summed in float32: XLA for CPU is fast in bfloat16 only with such a result."""
    return jnp.einsum(spec, first, other, preferred_element_type=jnp.float32)
