"""Attention over pages by an accelerator's kernel, which reads each page of a row once, up to the last used.

    ragged    TPUs: rows of any length, sliding windows. Key and value of each head are side by side:
              kv[B, S, 2K, H]
    decoded   GPUs: one query a row, which sees all before it. k[B, K, S, H] and v; narrow types have scales

`why_no_paged` (layout/attention.py) gives the reasons for having no kernel.

Sources, in jax.experimental.pallas.ops: tpu.ragged_paged_attention, gpu.paged_attention.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.models.config import Window
from meshwright.models.transformer import heads_of_tile
from meshwright.nn.attention.reference import Scores

# The kernel's own table of the fastest sizes (v6e) has 4 to 16 pages and 32 queries in nearly all cases.
_PAGES_OF_BLOCK, _QUERIES_OF_BLOCK = 16, 32
# Page numbers of one call: they share the 1 MB of scalar memory with the kernel's own.
_MOST_PAGES = 1 << 17
# For the GPU's kernel: positions of a block, which are kept on chip; most parts of a sequence that are
# attended to at once, since each part's sums pass through memory; and parts of all sequences and heads that
# keep a GPU of 100 to 150 processors busy.
_POSITIONS_OF_BLOCK, _PARTS, _AT_ONCE = 128, 16, 256
# The heads of one group are padded to the rows of a tensor core's tile.
_HEADS_OF_TILE = 16


def side_by_side(k: Array, v: Array) -> Array:
    """kv[N, 2K, H] of k[N, K, H] and v[N, K, H], in the order of a pool."""
    tokens, heads, width = k.shape
    both = jnp.stack([k, v], axis=2)
    split = jax.typeof(k).sharding.spec
    return jnp.reshape(both, (tokens, 2 * heads, width), out_sharding=split)


def ragged(
    q: Array, positions: Array, tables: Array, pool: Array, window: Window | None, how: Scores
) -> Array:
    """out[R, Q, N, H] of q[R, Q, N, H] over the pages of each row, as `PagedCache.attend` defines it.

    positions i32[R, Q], negative for padding, which comes last; tables i32[R, P].
    """
    num_rows, length = positions.shape
    size = pool.shape[1]
    lengths = jnp.max(positions, axis=1) + 1
    if window is not None:
        # Pages before the window may be reused by other sequences: tables begin at the first visible page.
        begins = jnp.maximum(window.first(positions[:, 0]), 0) // size
        width = min(tables.shape[1], -(-(window.size - 1 + length) // size) + 1)
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


def _of_rows(
    q: Array, lengths: Array, tables: Array, pool: Array, window: Window | None, how: Scores
) -> Array:
    """The queries of some rows over the first `lengths` positions of their tables."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    num_rows, length, *heads = q.shape
    out = ragged_paged_attention(
        jnp.reshape(q, (num_rows * length, *heads)),
        pool,
        jnp.maximum(lengths, 1),  # a row of padding reads one key: the kernel supports no row without keys
        tables,
        jnp.arange(num_rows + 1, dtype=jnp.int32) * length,
        jnp.asarray([num_rows], jnp.int32),
        sm_scale=1.0 if how.scale is None else how.scale,
        sliding_window=window.size if window else None,
        soft_cap=how.softcap,
        num_kv_pages_per_block=min(_PAGES_OF_BLOCK, tables.shape[1]),
        num_queries_per_block=min(_QUERIES_OF_BLOCK, num_rows * length),
    )
    return jnp.reshape(out, q.shape)


def decoded(
    q: Array,
    positions: Array,
    tables: Array,
    pools: Sequence[Array],
    scales: Sequence[Array] | None,
    how: Scores,
    *,
    batch_invariant: bool = False,
    interpret: bool = False,
) -> Array:
    """out[R, 1, N, H] of q[R, 1, N, H] over the pages of each row, as in `PagedCache.attend`.

    positions i32[R, 1], negative for padding; tables i32[R, P]; pools, and for narrow types scales f32[B, K,
    S]: of keys, then of values. batch_invariant: the order of sums does not depend on the number of rows.
    interpret: run it in JAX, on any platform.
    """
    num_rows, _, num_heads, width = q.shape
    num_pages, num_kv_heads, size, _ = pools[0].shape
    group = num_heads // num_kv_heads
    together = max(1, _POSITIONS_OF_BLOCK // size)
    parts = min(_PARTS, -(-tables.shape[1] // together))
    if not batch_invariant:
        parts = min(parts, -(-_AT_ONCE // (num_rows * num_kv_heads)))
    missing = -tables.shape[1] % (parts * together)
    # The kernel reads pools with all pages of a head together. It is given one head: each head of a row is
    # passed as a row, and each head of a page as a page, so that pools are not transposed.
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    tables = jnp.pad(tables, ((0, 0), (0, missing)))[:, None] * num_kv_heads + heads
    scaled = q.astype(jnp.float32) * (1.0 if how.scale is None else how.scale)
    narrow = [jnp.reshape(x, (1, num_pages * num_kv_heads, size)) for x in scales or ()]
    with jax.named_scope(heads_of_tile(group, -(-group // _HEADS_OF_TILE) * _HEADS_OF_TILE)):
        out = _paged_attention()(
            jnp.reshape(scaled.astype(q.dtype), (num_rows * num_kv_heads, group, width)),
            *(jnp.reshape(x, (1, num_pages * num_kv_heads, size, width)) for x in pools),
            jnp.reshape(tables, (num_rows * num_kv_heads, -1)),
            jnp.repeat(jnp.max(positions, axis=1) + 1, num_kv_heads),
            *narrow,
            block_h=_HEADS_OF_TILE,
            pages_per_compute_block=together,
            k_splits=parts,
            attn_logits_soft_cap=how.softcap,
            interpret=interpret,
        )
    return jnp.reshape(out, q.shape)


def _paged_attention() -> Callable[..., Array]:
    """JAX's kernel of GPUs. JAX 0.12 deprecates its module, and names no other that reads pages.

    The warning is muted: this module chose the kernel, so users of a server have nothing to change.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*paged_attention is deprecated", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    return paged_attention
