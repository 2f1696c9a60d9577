"""The vocabulary-parallel embedding: each device looks up the ids it owns and the sum is shared.

table[V_tensor, D_fsdp] --AllGather_fsdp--> [V_tensor, D]
ids outside the shard give zero rows, so x[B, T, D]{U_tensor} is finished by an AllReduce
(or a ReduceScatter into T with sequence parallelism). Source: Megatron-LM (Shoeybi et al., 2019).
"""

import operator
from collections.abc import Callable
from itertools import groupby

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import reshard

from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of
from meshwright.layout.moves.attention import token_sharding
from meshwright.nn.products.execute import SentIn
from meshwright.nn.start.device_mesh import partition_spec, reduced_axes
from meshwright.notation.array import ShardedArray


def embed_positions(positions: Array, table: Array, layout: Layout, sent_in: SentIn | None = None) -> Array:
    """x[B, T, D] of positions[B, T] and table[W, D_fsdp]: gathered over fsdp, each device its own rows.

    x has the type that the table is sent in, by default its own.
    """
    sent_in = sent_in or SentIn(table.dtype, table.dtype)
    stored, out = layout.weight("positions", "WD"), layout.activation("x", "BTD")
    used = stored.replace(axes={"W": (), "D": out.axes_of("D")})
    mine = ShardedArray("positions", ("B", "T"), out.axes[:2])

    def local(positions_local: Array, table_local: Array) -> Array:
        table_local = _fetched(table_local, stored, used, mine, sent_in)
        return table_local[positions_local].astype(sent_in.forward)

    kept = reduced_axes(jax.typeof(table).sharding.spec)
    specs = (partition_spec(mine), partition_spec(stored, kept))
    looked_up = jax.shard_map(local, in_specs=specs, out_specs=partition_spec(out))
    return looked_up(reshard(positions, specs[0]), table)


def _fetched(
    table_local: Array, stored: ShardedArray, used: ShardedArray, looked_up: ShardedArray, sent_in: SentIn
) -> Array:
    """A table's shard for look-ups, in `sent_in.wider`; gradients are summed in `sent_in.backward`."""

    def gathered(table_local: Array) -> Array:
        return _gathered(_rows_held(table_local, stored, looked_up), stored, used, looked_up)

    if sent_in.forward == sent_in.backward:
        return gathered(table_local.astype(sent_in.forward))

    @jax.custom_vjp
    def fetched(table_local: Array) -> Array:
        return gathered(table_local.astype(sent_in.forward)).astype(sent_in.wider)

    def backward(table_local: Array, d_used: Array) -> tuple[Array]:
        _, pull_back = jax.vjp(gathered, table_local.astype(sent_in.backward))
        return (pull_back(d_used.astype(sent_in.backward))[0].astype(table_local.dtype),)

    fetched.defvjp(lambda table_local: (fetched(table_local), table_local), backward)
    return fetched(table_local)


def _rows_held(table_local: Array, stored: ShardedArray, looked_up: ShardedArray) -> Array:
    """A table typed as this device's own over axes that split its look-ups: its gradient is a partial sum.

    This comes before the table is gathered: otherwise its gradient would be summed whole over `data` and only
    then scattered over `fsdp`; scattered first, only a share is summed.
    """
    axes = tuple(axis for axis in looked_up.sharded_axes if axis not in stored.sharded_axes)
    return lax.pcast(table_local, axes, to="varying") if axes else table_local


def _gathered(table_local: Array, stored: ShardedArray, used: ShardedArray, looked_up: ShardedArray) -> Array:
    """A table's shard as it is used: columns gathered, then rows.

    Over axes that do not split the ids, all devices look up the same rows.
    """
    for dim in (1, 0):
        axes = [axis for axis in stored.axes[dim] if axis not in used.axes[dim]]
        for varies, some in reversed(
            [(key, tuple(some)) for key, some in groupby(axes, looked_up.sharded_axes.__contains__)]
        ):
            # [V, n, D/n]: so that its gradient stays a reduce-scatter (see scatter.py).
            to = "varying" if varies else "invarying"
            parts = lax.all_gather(table_local, some, axis=dim, to=to)
            shape = (parts.shape[0], -1) if dim else (-1, parts.shape[-1])
            table_local = jnp.reshape(parts, shape)
    return table_local


def embed(
    tokens: Array,
    table: Array,
    layout: Layout,
    sent_in: SentIn | None = None,
    *,
    is_column: bool = False,
    rows_of: Callable[[Array, Array], Array] = operator.getitem,
) -> Array:
    """x[B, T, D] of tokens[B, T]; is_column: of a table[V_tensor, 1], whose D is not split.

    x has the type that the table is sent in, by default its own. rows_of: takes the rows of ids from a
    device's part of the table.
    """
    sent_in = sent_in or SentIn(table.dtype, table.dtype)
    stored = layout.weight("embed", "VD")
    out = layout.activation("x", "BTD")
    used, ids = contraction_of(layout, "embed", "BTV,VD->BTD").rhs_computed, token_sharding(layout, "tokens")
    if is_column:
        stored, used, out = (array.replace(axes={"D": ()}) for array in (stored, used, out))
    split_vocab = used.axes_of("V")
    # Sums over these axes are handed out by position; the others are whole on every device.
    scattered = tuple(axis for axis in out.axes_of("T") if axis in split_vocab)
    summed = tuple(axis for axis in split_vocab if axis not in scattered)

    def local(tokens_local: Array, table_local: Array) -> Array:
        table_local = _fetched(table_local, stored, used, ids, sent_in)
        if not split_vocab:
            return rows_of(table_local, tokens_local).astype(sent_in.forward)
        rows = tokens_local - lax.axis_index(split_vocab) * table_local.shape[0]
        mine = (rows >= 0) & (rows < table_local.shape[0])
        rows_held = rows_of(table_local, jnp.where(mine, rows, 0))
        x_local = jnp.where(mine[..., None], rows_held, 0).astype(sent_in.forward)
        if scattered:
            # [B, n, T/n, D]: so that it stays a reduce-scatter (see scatter.py).
            parts = jnp.reshape(x_local, (x_local.shape[0], lax.axis_size(scattered), -1, x_local.shape[-1]))
            x_local = lax.psum_scatter(parts, scattered, scatter_dimension=1)
        # After the scatter, so that less is summed.
        return lax.psum(x_local, summed) if summed else x_local

    kept = reduced_axes(jax.typeof(table).sharding.spec)
    specs = (partition_spec(ids), partition_spec(stored, kept))
    return jax.shard_map(local, in_specs=specs, out_specs=partition_spec(out))(tokens, table)
