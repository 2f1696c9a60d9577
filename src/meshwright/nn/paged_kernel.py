"""Attention over pages by a TPU's kernel, which fetches pages while it attends to those before.

    pool     kv[B, S, 2K, H]: key and value of each head side by side, as the kernel reads them

It is JAX's ragged paged attention. A row costs what its sequence is long, or its window is wide. For what
there is none, `why_no_paged_kernel` says (layout/paged.py).

Source: jax.experimental.pallas.ops.tpu.ragged_paged_attention.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.nn.attention import Scores

# The kernel's own table of sizes that were fastest (v6e) has 4 to 16 pages and 32 queries nearly everywhere.
_PAGES_OF_BLOCK, _QUERIES_OF_BLOCK = 16, 32
# Numbers of pages of one call: they lie in the 1 MB of scalar memory, beside the kernel's own.
_MOST_PAGES = 1 << 17


def side_by_side(k: Array, v: Array) -> Array:
    """kv[N, 2K, H] of k[N, K, H] and v alike, as a pool has them."""
    tokens, heads, width = k.shape
    both = jnp.stack([k, v], axis=2)
    split = jax.typeof(k).sharding.spec
    return jnp.reshape(both, (tokens, 2 * heads, width), out_sharding=split)


def attention(
    q: Array, positions: Array, tables: Array, pool: Array, window: int | None, how: Scores
) -> Array:
    """out[R, Q, N, H] of q[R, Q, N, H] over the pages of each row, as `PagedCache.attend` has it.

    positions i32[R, Q], those of padding, which come last, negative; tables i32[R, P].
    """
    num_rows, length = positions.shape
    size = pool.shape[1]
    lengths = jnp.max(positions, axis=1) + 1
    if window is not None:
        # What the window has left may be anyone's pages: tables begin where the row's first query sees.
        begins = jnp.maximum(positions[:, 0] - window + 1, 0) // size
        width = min(tables.shape[1], -(-(window - 1 + length) // size) + 1)
        seen = begins[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        tables = jnp.take_along_axis(tables, jnp.minimum(seen, tables.shape[1] - 1), axis=1)
        lengths -= begins * size
    # The kernel takes a row's last query for the last token of its sequence, so padding goes first.
    padding = jnp.sum(positions < 0, axis=1)
    turned = q if length == 1 else jax.vmap(partial(jnp.roll, axis=0))(q, padding)
    most = max(1, _MOST_PAGES // tables.shape[1])
    cuts = [slice(first, first + most) for first in range(0, num_rows, most)]
    parts = [_of_rows(turned[cut], lengths[cut], tables[cut], pool, window, how) for cut in cuts]
    out = jnp.concatenate(parts)
    out = out if length == 1 else jax.vmap(partial(jnp.roll, axis=0))(out, -padding)
    return jnp.where((positions >= 0)[..., None, None], out, jnp.zeros((), out.dtype))


def _of_rows(q: Array, lengths: Array, tables: Array, pool: Array, window: int | None, how: Scores) -> Array:
    """The queries of some rows over the first so many positions of their tables."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    num_rows, length, *heads = q.shape
    out = ragged_paged_attention(
        jnp.reshape(q, (num_rows * length, *heads)),
        pool,
        jnp.maximum(lengths, 1),  # a row of padding reads one key: the kernel has no rows without
        tables,
        jnp.arange(num_rows + 1, dtype=jnp.int32) * length,
        jnp.asarray([num_rows], jnp.int32),
        sm_scale=1.0 if how.scale is None else how.scale,
        sliding_window=window,
        soft_cap=how.softcap,
        num_kv_pages_per_block=min(_PAGES_OF_BLOCK, tables.shape[1]),
        num_queries_per_block=min(_QUERIES_OF_BLOCK, num_rows * length),
    )
    return jnp.reshape(out, q.shape)
