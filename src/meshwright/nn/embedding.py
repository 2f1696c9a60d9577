"""The vocabulary-parallel embedding: each device looks up the ids it owns and the sum is shared.

table[V_tensor, D_fsdp] --AllGather_fsdp--> [V_tensor, D]
ids outside the shard give zero rows, so x[B, T, D]{U_tensor} is finished by an AllReduce
(or a ReduceScatter into T with sequence parallelism). Source: Megatron-LM (Shoeybi et al., 2019).
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import reshard

from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of
from meshwright.layout.moves.attention import token_sharding
from meshwright.nn.products.execute import SentIn
from meshwright.nn.start.device_mesh import partition_spec, reduced_axes
from meshwright.notation.array import ShardedArray


def embed_positions(positions: Array, table: Array, layout: Layout, sent_in: SentIn | None = None) -> Array:
    """x[B, T, D] of positions[B, T] and table[W, D_fsdp], which is gathered for each device's own tokens.

    x has the type in which the table is gathered; by default that is the table's own.
    """
    sent_in = sent_in or SentIn(table.dtype, table.dtype)
    stored, out = layout.weight("positions", "WD"), layout.activation("x", "BTD")
    used = stored.replace(axes={"W": (), "D": out.axes_of("D")})
    ids = ShardedArray("positions", ("B", "T"), out.axes[:2])

    def local(positions_local: Array, table_local: Array) -> Array:
        rows = _looked_up(table_local, positions_local, stored, used, ids, sent_in, _rows)
        return rows.astype(sent_in.forward)

    kept = reduced_axes(jax.typeof(table).sharding.spec)
    specs = (partition_spec(ids), partition_spec(stored, kept))
    looked_up = jax.shard_map(local, in_specs=specs, out_specs=partition_spec(out))
    return looked_up(reshard(positions, specs[0]), table)


def _looked_up(
    table_local: Array,
    ids: Array,
    stored: ShardedArray,
    used: ShardedArray,
    looked_up: ShardedArray,
    sent_in: SentIn,
    rows_of: Callable[[Array, Array], Array],
) -> Array:
    """The rows [..., D] of ids in a table, in `sent_in.wider`; gradients are summed in `sent_in.backward`.

    The gradient is made as [n, V, D / n], whose first dimension its reduce-scatter splits (see scatter.py).
    A gradient [V, D] would be summed by XLA for TPUs with V as the minor dimension. The table and its moments
    would then be copied to that order and back for the update: 1.6 GB in four layers of Qwen3.5 on 8 v5p (jax
    0.10.2). rows_of: takes the rows of ids from the table in the forward pass.
    """

    def gathered(table_local: Array, *, apart: bool = False) -> Array:
        return _gathered(_rows_held(table_local, stored, looked_up), stored, used, looked_up, apart=apart)

    @jax.custom_vjp
    def rows(table_local: Array, ids: Array) -> Array:
        return rows_of(gathered(table_local.astype(sent_in.forward)).astype(sent_in.wider), ids)

    def backward(saved: tuple[Array, Array], d_rows: Array) -> tuple[Array, Any]:
        table_local, ids = saved

        def rows_apart(table_local: Array) -> Array:
            return _rows(gathered(table_local, apart=True).astype(sent_in.wider), ids)

        _, pull_back = jax.vjp(rows_apart, table_local.astype(sent_in.backward))
        (d_table,) = pull_back(d_rows)
        return d_table.astype(table_local.dtype), np.zeros(ids.shape, jax.dtypes.float0)

    rows.defvjp(lambda *given: (rows(*given), given), backward)
    return rows(table_local, ids)


def _rows(table: Array, ids: Array) -> Array:
    """The rows [..., D] of ids in a table[V, D], or in one whose columns are apart, [n, V, D / n]."""
    if table.ndim == 2:
        return table[ids]
    parts = jnp.moveaxis(table[:, ids], 0, -2)
    return jnp.reshape(parts, (*ids.shape, -1))


def _rows_held(table_local: Array, stored: ShardedArray, looked_up: ShardedArray) -> Array:
    """The table, with a gradient that is a partial sum over the axes that split the ids.

    It is typed as different on the devices of these axes before it is gathered. Its gradient is then
    scattered over `fsdp` first, and only a share is summed over `data`; otherwise the whole gradient would be
    summed.
    """
    axes = tuple(axis for axis in looked_up.sharded_axes if axis not in stored.sharded_axes)
    return lax.pcast(table_local, axes, to="varying") if axes else table_local


def _gathered(
    table_local: Array, stored: ShardedArray, used: ShardedArray, looked_up: ShardedArray, *, apart: bool
) -> Array:
    """A table's shard as it is used: columns gathered, then rows.

    Over axes that do not split the ids, all devices look up the same rows. apart: the columns of n devices
    stay apart, as [n, V, D/n].
    """
    for dim in (1, 0):
        axes = [axis for axis in stored.axes[dim] if axis not in used.axes[dim]]
        for varies, some in reversed(
            [(key, tuple(some)) for key, some in groupby(axes, looked_up.sharded_axes.__contains__)]
        ):
            to, before = "varying" if varies else "invarying", table_local.shape
            place = 0 if apart and dim else len(before) - 2 + dim
            parts = lax.all_gather(table_local, some, axis=place, to=to)
            if not dim:
                table_local = jnp.reshape(parts, (*before[:-2], -1, before[-1]))
            else:
                table_local = jnp.reshape(parts, (-1, *before[-2:]) if apart else (before[0], -1))
    return table_local


def embed(
    tokens: Array,
    table: Array,
    layout: Layout,
    sent_in: SentIn | None = None,
    *,
    is_column: bool = False,
    rows_of: Callable[[Array, Array], Array] = _rows,
) -> Array:
    """x[B, T, D] of tokens[B, T]; is_column: of a table[V_tensor, 1], whose D is not split.

    x has the type in which the table is gathered; by default that is the table's own. rows_of: takes the rows
    of ids from a device's part of the table.
    """
    sent_in = sent_in or SentIn(table.dtype, table.dtype)
    stored = layout.weight("embed", "VD")
    out = layout.activation("x", "BTD")
    used, ids = contraction_of(layout, "embed", "BTV,VD->BTD").rhs_computed, token_sharding(layout, "tokens")
    if is_column:
        stored, used, out = (array.replace(axes={"D": ()}) for array in (stored, used, out))
    split_vocab = used.axes_of("V")
    # Over these axes x is reduce-scattered by position, and over the others all-reduced.
    scattered = tuple(axis for axis in out.axes_of("T") if axis in split_vocab)
    summed = tuple(axis for axis in split_vocab if axis not in scattered)
    gathered = tuple(axis for axis in stored.axes_of("V") if axis not in split_vocab)

    def local(tokens_local: Array, table_local: Array) -> Array:
        rows_at = partial(
            _looked_up, stored=stored, used=used, looked_up=ids, sent_in=sent_in, rows_of=rows_of
        )
        if not split_vocab:
            return rows_at(table_local, tokens_local).astype(sent_in.forward)
        num_rows = table_local.shape[0] * lax.axis_size(gathered) if gathered else table_local.shape[0]
        rows = tokens_local - lax.axis_index(split_vocab) * num_rows
        is_held = (rows >= 0) & (rows < num_rows)
        looked_up = rows_at(table_local, jnp.where(is_held, rows, 0))
        x_local = jnp.where(is_held[..., None], looked_up, 0).astype(sent_in.forward)
        if scattered:
            # As [B, n, T/n, D] XLA keeps the reduce-scatter (see scatter.py).
            parts = jnp.reshape(x_local, (x_local.shape[0], lax.axis_size(scattered), -1, x_local.shape[-1]))
            x_local = lax.psum_scatter(parts, scattered, scatter_dimension=1)
        # The all-reduce comes after the scatter, and thus sums fewer bytes.
        return lax.psum(x_local, summed) if summed else x_local

    kept = reduced_axes(jax.typeof(table).sharding.spec)
    specs = (partition_spec(ids), partition_spec(stored, kept))
    return jax.shard_map(local, in_specs=specs, out_specs=partition_spec(out))(tokens, table)
