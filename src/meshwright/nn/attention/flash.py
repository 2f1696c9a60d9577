"""Causal attention by kernels that keep scores on chip: splash attention on TPUs, cuDNN's on GPUs.

They support sequences that start at position 0: query t sees the keys s <= t, within its `window`. Both skip
blocks that the mask hides. For the backward pass they keep their result and the log-sum-exp of each query's
scores, and compute the scores again.

Sources: Dao, "FlashAttention-2", 2023; jax.experimental.pallas.ops.tpu.splash_attention;
jax.nn.dot_product_attention.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
from jax.sharding import PartitionSpec

from meshwright.layout import Layout
from meshwright.layout.attention_kernels import BLOCK, has_chunks, why_no_flash, window_block
from meshwright.models.config import ModelConfig
from meshwright.models.layer_kinds import Window
from meshwright.nn.attention.blockwise import dealt_positions, in_order, zigzag
from meshwright.nn.attention.by_formula import ScoreForm
from meshwright.nn.each_device import KEPT, spec_of, with_gradient
from meshwright.nn.start.device_mesh import partition_spec, platform

# The fused backward kernel makes a partial dQ for each block of keys: most that are in memory at once.
_MAX_PARTIAL_QUERIES = 8
_CAPABILITIES = (10.0, 9.0, 8.0)

_Kernel = Callable[..., Array]


def flash_kernels(
    q: Array,
    config: ModelConfig,
    layout: Layout,
    windows: Sequence[Window | None],
    how: ScoreForm,
    *,
    has_documents: bool = False,
) -> list[_Kernel] | None:
    """The platform's kernel for out[B, T, N, O] of q[B, T, N, H], k[B, T, K, H] and v[B, T, K, O], by window.

    Kernels also take sinks[N], and the document of each query and key, both i32[B, T]: None for a model
    without sinks or documents. Returns None if the platform has no kernel for the model and the layout
    (`why_no_flash`), or for unsupported packed documents. Call under `jax.set_mesh`.
    """
    blocks = platform().flash
    # The TPU's kernel counts chunks from the sequence's start, the model from the document's start.
    if blocks is None or (has_documents and (not blocks.documents or has_chunks(config, q.shape[1]))):
        return None
    if why_no_flash(platform(), capability(), config, layout, q.shape[1]):
        return None
    kernel = {"splash": splash, "cudnn": cudnn}[blocks.name]
    seen = [None if one and one.chunked and one.size >= q.shape[1] else one for one in windows]
    return [partial(kernel, layout=layout, window=window, how=how) for window in seen]


def capability() -> float | None:
    """The compute capability that JAX lets kernels ask for; None without CUDA."""
    return next((one for one in _CAPABILITIES if cudnn_attention.check_compute_capability(str(one))), None)


@contextmanager
def kernels_of(capability: float) -> Iterator[None]:
    """Within it programs are made for GPUs of this compute capability: JAX asks the machine's own."""

    asked = cudnn_attention.check_compute_capability
    cudnn_attention.check_compute_capability = lambda wanted: capability >= float(wanted)
    try:
        yield
    finally:
        cudnn_attention.check_compute_capability = asked


def splash(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None = None,
    documents: tuple[Array, Array] | None = None,
    *,
    layout: Layout,
    window: Window | None,
    how: ScoreForm,
    interpret: bool = False,
) -> Array:
    """Attention by the TPU's kernel, each device with its own sequences, heads and positions of queries.

    Positions that are split over devices are dealt as `zigzag` does, of keys and values too.
    interpret: run it in JAX, on any platform.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1:3]
    queries = layout.activation("q", "BTNH")
    over = queries.axes_of("T")
    num_shards = layout.mesh.size(over)
    shape = length, length
    mask: Any = masks.CausalMask(shape)
    if window and window.chunked:
        mask = masks.ChunkedCausalMask(shape, window.size)
    elif window:
        mask = masks.LocalMask(shape, (window.size - 1, 0), 0)
    if over:
        mask.q_sequence = dealt_positions(length, num_shards)
    # The early and the late queries of a device are in blocks of their own.
    block = gcd(length // (2 * num_shards) if over else length, window_block(window) if window else BLOCK)
    one_pass = length // block <= _MAX_PARTIAL_QUERIES
    apart: dict[str, Any] = {} if one_pass else {"block_q_dq": block, "block_kv_dq": block}
    blocks = kernels.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block,
        use_fused_bwd_kernel=one_pass, **apart,
    )  # fmt: skip
    heads_local = heads // layout.mesh.size(queries.axes_of("N"))
    make = partial(
        kernels.make_splash_mha, masks.MultiHeadMask([mask] * heads_local), block_sizes=blocks,
        head_shards=1, q_seq_shards=num_shards,
        attn_logits_soft_cap=how.softcap, interpret=interpret, residual_checkpoint_name=KEPT,
    )  # fmt: skip
    # The kernel holds the blocks to skip as arrays: constants that no pass saves for another.
    kernel = jax.tree.structure(make())

    def skips() -> list[Array]:
        return jax.tree.leaves(_of_shard(make(), over) if over else make())

    def local(q: Array, k: Array, v: Array, *rest: Array) -> Array:
        given = iter(rest)
        sinks_here = next(given) if sinks is not None else None
        documents_local = [next(given) for _ in documents or ()]
        run: Any = jax.tree.unflatten(kernel, list(given))
        if not documents_local:
            return jax.vmap(lambda q, k, v: run(q, k, v, sinks=sinks_here))(q, k, v)
        return jax.vmap(lambda *x: run(*x, sinks=sinks_here))(q, k, v, kernels.SegmentIds(*documents_local))

    scaled = (q.astype(jnp.float32) * how.scale).astype(q.dtype)
    by_head = [jnp.swapaxes(x, 1, 2) for x in (scaled, k, v)]
    differentiated = [*by_head, *([] if sinks is None else [sinks])]
    of_documents = (documents[0], in_order(documents[1], num_shards, 1)) if documents else ()
    arrays = [*differentiated, *of_documents]
    run = with_gradient(
        local, [spec_of(x) for x in arrays], _result(layout, "BNTH"), len(differentiated),
        kept=KEPT, constants=skips, names=("q", "k", "v", "sinks")[: len(differentiated)],
        moves=(partial(_moved_keys, num_shards, in_order), partial(_moved_keys, num_shards, zigzag)),
    )  # fmt: skip
    return jnp.swapaxes(run(*arrays), 1, 2)


def _moved_keys(
    num_shards: int, move: Callable[[Array, int, int], Array], blocks: Sequence[Array]
) -> tuple[Array, ...]:
    """A device's `blocks` q, k[B, K, T, H], v, ... with the positions of k and v reordered by `move`.

    Not on whole arrays: their cotangents are partial sums, which JAX does not concatenate in a stage of a
    pipeline (jax 0.10.2).
    """
    q, *keys_and_values = blocks[:3]
    return (q, *(move(x, num_shards, 2) for x in keys_and_values), *blocks[3:])


def _of_shard(kernel: Any, over: Sequence[str]) -> Any:
    """The kernel of this device's queries of one that was made for all."""

    def share(name: str, x: Array) -> Array:
        dim = 0 if name == "q_sequence" else 1  # others are [heads, blocks of queries, blocks of keys]
        size = x.shape[dim] // lax.axis_size(over)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(over) * size, size, dim)

    def of_pass(info: Any) -> Any:
        known = {name: x for name, x in info._asdict().items() if isinstance(x, Array)}
        return info._replace(**{name: share(name, x) for name, x in known.items()})

    passes = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    return type(kernel)(*(info and of_pass(info) for info in passes), **kernel.kwargs)


def cudnn(
    q: Array,
    k: Array,
    v: Array,
    sinks: None = None,
    documents: None = None,
    *,
    layout: Layout,
    window: Window | None,
    how: ScoreForm,
) -> Array:
    """Attention by cuDNN, each device with its own sequences and heads.

    jax.nn.dot_product_attention takes only values as wide as keys: narrower values are padded with zeros.
    """
    attend = partial(
        jax.nn.dot_product_attention,
        is_causal=True, scale=how.scale, implementation="cudnn",
        local_window_size=(window.size - 1, 0) if window else None,
    )  # fmt: skip

    def local(q: Array, k: Array, v: Array) -> Array:
        width = v.shape[-1]
        wide = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] - width)))
        return attend(q, k, wide)[..., :width]

    arrays = q, k, v
    return with_gradient(local, [spec_of(x) for x in arrays], _result(layout, "BTNH"), 3, kept=KEPT)(*arrays)


def _result(layout: Layout, letters: str) -> PartitionSpec:
    """How the result is split: as the queries are."""
    return partition_spec(layout.activation("q", letters))
