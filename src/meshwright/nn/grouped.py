"""Experts by grouped products: tokens are sorted by expert, and each row is multiplied with its expert alone.

    x[B, T, D], gates[B, T, E]   gathered over the axes of E: the tokens that a device's own experts meet
    d[E, C, D]                   their rows by expert, each expert's filled up to whole blocks with zeros
    d . w                        a product of each block with the weights of its expert
    y[B, T, D]                   rows summed by gate, of a device's own experts: partial over the axes of E

No token is dropped. There is room for all rows that there could be; the loops over blocks end after those
that there are (layout/grouped.py). A block is one product on every platform: `lax.ragged_dot` multiplies
all rows with all of a device's experts on CPUs and GPUs, and on TPUs for the weights' gradients (jax 0.10.2).
Tokens are gathered, so that the same bytes travel whatever they choose: XLA for CPU has no exchange of
unequal parts.
"""

from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, get_abstract_mesh

from meshwright.layout import Layout
from meshwright.layout.grouped import Blocks, blocks_of
from meshwright.models.config import MoE
from meshwright.models.transformer import by_even_load
from meshwright.nn.each_device import axes_of, each_device, of_cotangent, spec_of, with_gradient
from meshwright.nn.mesh import partition_spec
from meshwright.notation.array import Axes


class Routes(NamedTuple):
    """Which rows there are of d[E, C, D], on each device [e, c] of those that split E and C.

    tokens: i32[e, c, C] which of the tokens met is the row, or their number where it is none.
    experts: i32[e, c, blocks] whose rows a block has, of a device's own experts. num_blocks: i32[e, c] that
    there are. gates: f32[B, T, E] of the tokens met, for a device's own experts. blocks: of a device.
    """

    tokens: Array
    experts: Array
    num_blocks: Array
    gates: Array
    blocks: Blocks


def routes_of(gates: Array, layout: Layout, moe: MoE) -> Routes:
    """The rows of each device, of the gates of the tokens that it meets (`Layout.gates_to_experts`)."""
    given, sizes = spec_of(gates), get_abstract_mesh().shape
    over = [prod(sizes[axis] for axis in axes_of(entry)) for entry in given.partitions]
    num_tokens, own = gates.shape[0] * gates.shape[1] // (over[0] * over[1]), gates.shape[2] // over[2]
    blocks = blocks_of(num_tokens, moe, own)

    def local(gates: Array) -> tuple[Array, Array, Array]:
        by_token = jnp.reshape(gates, (-1, gates.shape[-1]))
        chosen = by_token > 0
        num_blocks = -(-jnp.sum(chosen, axis=0, dtype=jnp.int32) // blocks.rows)
        ends = jnp.cumsum(num_blocks)
        first = blocks.rows * (ends - num_blocks)
        place = first[None, :] + jnp.cumsum(chosen, axis=0, dtype=jnp.int32) - 1
        num_rows = blocks.most * blocks.rows
        numbers = lax.broadcasted_iota(jnp.int32, chosen.shape, 0)
        tokens = jnp.full(num_rows, num_tokens, jnp.int32)
        tokens = tokens.at[jnp.where(chosen, place, num_rows)].set(numbers, mode="drop")
        experts = jnp.sum(jnp.arange(blocks.most, dtype=jnp.int32)[:, None] >= ends[None, :], axis=1)
        experts = jnp.minimum(experts, own - 1).astype(jnp.int32)
        return tokens[None, None], experts[None, None], ends[None, None, -1]

    rows = layout.activation("d", "ECD")
    place = PartitionSpec(*partition_spec(rows)[:2])
    found = each_device(local, (given,), (place, place, place))(lax.stop_gradient(gates))
    tokens, experts, num_blocks = found
    return Routes(tokens, experts, num_blocks, gates, blocks)


def rows_of_tokens(x: Array, routes: Routes, layout: Layout) -> Array:
    """d[E, C, D] of the tokens met, x[B, T, D]; rows that are none are zero."""
    plan = layout.contraction("expert_in", "ECD,EDM->ECM")
    out = partition_spec(plan.lhs, plan.lhs_reshard.yielded.unreduced)

    def local(x: Array, tokens: Array) -> Array:
        by_token = jnp.reshape(x, (-1, x.shape[-1]))
        return by_token.at[tokens[0, 0]].get(mode="fill", fill_value=0)[None]

    specs = spec_of(x), spec_of(routes.tokens)
    return with_gradient(local, specs, out, 1)(x, routes.tokens)


def tokens_of_rows(y: Array, routes: Routes, layout: Layout) -> Array:
    """What each device's rows of `grouped_product` add to the tokens met, times gates: a partial sum."""
    out = partition_spec(layout.tokens_from_experts("y").given)

    def local(y: Array, gates: Array, tokens: Array, experts: Array) -> Array:
        by_token = jnp.reshape(gates, (-1, gates.shape[-1]))
        tokens, experts = tokens[0, 0], experts[0, 0]
        owners = jnp.repeat(experts, tokens.shape[0] // experts.shape[0])
        gate = by_token.at[tokens, owners].get(mode="fill", fill_value=0)
        total = jnp.zeros((by_token.shape[0], y.shape[-1]), y.dtype)
        rows = jnp.reshape(y, (-1, y.shape[-1]))
        total = total.at[tokens].add(rows * gate[:, None].astype(y.dtype), mode="drop")
        return jnp.reshape(total, (*gates.shape[:2], y.shape[-1]))

    arrays = y, routes.gates, routes.tokens, routes.experts
    return with_gradient(local, [spec_of(one) for one in arrays], out, 2)(*arrays)


def grouped_product(x: Array, w: Array, routes: Routes, out: PartitionSpec, parts: Axes = ()) -> Array:
    """y[E, C, M] of x[E, C, D] and w[E, D, M], each block of rows by the weights of its expert.

    out: of y. parts: of a sum that stays partial, the axes of y[m, E, C, M], each device's own beside the
    others', since JAX can keep no partial sum for the backward pass of a loop (0.10.2). Cotangents are
    partial over what x and w are typed `reduced` over.
    """
    if parts:
        out = PartitionSpec(parts, *out.partitions)
    of_x, of_w, of_routes = spec_of(x), spec_of(w), (spec_of(routes.experts), spec_of(routes.num_blocks))
    split = {*of_w.reduced, *(axis for entry in of_w.partitions for axis in axes_of(entry))}
    trips = by_even_load(int(routes.blocks.even))

    @jax.custom_vjp
    def product(x: Array, w: Array, experts: Array, count: Array) -> Array:
        local = partial(_forward, scope=trips, num_dims=len(out.partitions))
        return each_device(local, (of_x, of_w, *of_routes), out)(x, w, experts, count)

    def forward(x: Array, w: Array, experts: Array, count: Array) -> tuple[Array, Any]:
        return product(x, w, experts, count), (x, w, experts, count)

    def backward(saved: Any, d_out: Array) -> tuple[Array, Array, None, None]:
        rows = [axis for entry in of_x.partitions[:2] for axis in axes_of(entry)]
        summed = tuple(axis for axis in rows if axis not in split)
        local: Any = partial(_backward, scope=trips, summed=summed)
        given, taken = (of_x, of_w, *of_routes, of_cotangent(out)), (of_cotangent(of_x), of_cotangent(of_w))
        d_x, d_w = each_device(local, given, taken)(*saved, d_out)
        return d_x, d_w, None, None

    product.defvjp(forward, backward)
    return product(x, w, routes.experts, routes.num_blocks)


def biased_rows(y: Array, b: Array, routes: Routes) -> Array:
    """y[E, C, M] plus each row's own of b[E, M]; of y[m, E, C, M] the first of the m devices adds it."""
    spec, of_b = spec_of(y), spec_of(b)
    parts = axes_of(spec.partitions[0]) if y.ndim == 4 else ()

    def local(y: Array, b: Array, experts: Array) -> Array:
        adds = (lax.axis_index(parts) == 0).astype(b.dtype) if parts else jnp.asarray(1, b.dtype)
        rows = jnp.repeat(experts[0, 0], y.shape[-2] // experts.shape[-1])
        return y + jnp.reshape((adds * b)[rows], y.shape)

    return with_gradient(local, (spec, of_b, spec_of(routes.experts)), spec, 2)(y, b, routes.experts)


def _forward(x: Array, w: Array, experts: Array, count: Array, *, scope: str, num_dims: int) -> Array:
    """y[..., C, M] of one device's blocks, of the other dimensions one each."""
    blocks, owners = _blocks(x, experts), experts[0, 0]

    def one(i: Array, y: Array) -> Array:
        made = _dot(blocks[i], w[owners[i]].astype(x.dtype), ((1,), (0,))).astype(y.dtype)
        return lax.dynamic_update_index_in_dim(y, made, i, 0)

    nothing = jnp.zeros((*blocks.shape[:2], w.shape[-1]), x.dtype)
    with jax.named_scope(scope):
        y = lax.fori_loop(0, count[0, 0], one, nothing)
    return jnp.reshape(y, (*[1] * (num_dims - 2), -1, w.shape[-1]))


def _backward(
    x: Array, w: Array, experts: Array, count: Array, d_out: Array, *, scope: str, summed: tuple[str, ...]
) -> tuple[Array, Array]:
    """The cotangents of one device's rows and weights; that of the weights is a sum in float32."""
    blocks, d_blocks, owners = _blocks(x, experts), _blocks(d_out, experts), experts[0, 0]

    def one(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        d_x, d_w = found
        owner, d_block = owners[i], d_blocks[i]
        made = _dot(d_block, w[owner].astype(d_block.dtype), ((1,), (1,))).astype(d_x.dtype)
        d_w = d_w.at[owner].add(_dot(blocks[i], d_block, ((0,), (0,))))
        return lax.dynamic_update_index_in_dim(d_x, made, i, 0), d_w

    with jax.named_scope(scope):
        d_x, d_w = lax.fori_loop(0, count[0, 0], one, (jnp.zeros_like(blocks), jnp.zeros(w.shape)))
    d_w = d_w.astype(w.dtype)
    return jnp.reshape(d_x, x.shape), lax.psum(d_w, summed) if summed else d_w


def _blocks(rows: Array, experts: Array) -> Array:
    """[blocks, rows of a block, D] of one device's rows [1, C, D]."""
    return jnp.reshape(rows, (experts.shape[-1], -1, rows.shape[-1]))


def _dot(one: Array, other: Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    """The product in float32: XLA for CPU is fast in bfloat16 with such a result alone."""
    return lax.dot_general(one, other, (contracted, ((), ())), preferred_element_type=jnp.float32)
