"""Causal attention by kernels that keep scores on chip: splash attention on TPUs, cuDNN's on GPUs.

They serve where a sequence starts at position 0: query t sees the keys s <= t, of these the last
`window`. Both skip blocks that the mask hides. For the backward pass they keep their result and the
log-sum-exp of each query's scores, and compute the scores again.

Sources: Dao, "FlashAttention-2", 2023; jax.experimental.pallas.ops.tpu.splash_attention;
jax.nn.dot_product_attention.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from meshwright.layout import Layout
from meshwright.layout.flash import why_no_flash
from meshwright.models.config import ModelConfig
from meshwright.nn.attention import Scores
from meshwright.nn.each_device import KEPT, with_gradient
from meshwright.nn.mesh import partition_spec, platform

_BLOCK = 512
# The one backward kernel adds to dQ once a block of keys: so many partial dQ lie in memory at once.
_MAX_PARTIAL_QUERIES = 8

Kernel = Callable[[Array, Array, Array], Array]


def flash_kernels(
    q: Array, config: ModelConfig, layout: Layout, windows: Sequence[int | None], how: Scores
) -> list[Kernel] | None:
    """The platform's kernel for out[B, T, N, H] of q[B, T, N, H] and k, v[B, T, K, H], for each window.

    None where there is none for the model and the layout (`why_no_flash`). Call under `jax.set_mesh`.
    """
    if why_no_flash(platform(), config, layout, q.shape[1]):
        return None
    kernel = {"tpu": splash, "gpu": cudnn}[platform()]
    return [partial(kernel, layout=layout, window=window, how=how) for window in windows]


def splash(
    q: Array,
    k: Array,
    v: Array,
    *,
    layout: Layout,
    window: int | None,
    how: Scores,
    interpret: bool = False,
) -> Array:
    """Attention by the TPU's kernel, each device with its own sequences and heads.

    interpret: run it in JAX, on any platform.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads, head_dim = q.shape[1:]
    shape = length, length
    mask = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
    block = gcd(length, _BLOCK)
    one_pass = length // block <= _MAX_PARTIAL_QUERIES
    apart: dict[str, Any] = {} if one_pass else {"block_q_dq": block, "block_kv_dq": block}
    blocks = kernels.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block,
        use_fused_bwd_kernel=one_pass, **apart,
    )  # fmt: skip
    heads_local = heads // layout.mesh.size(layout.activation("q", "BTNH").axes_of("N"))
    make = partial(
        kernels.make_splash_mha_single_device, masks.MultiHeadMask([mask] * heads_local), block_sizes=blocks,
        attn_logits_soft_cap=how.softcap, interpret=interpret, residual_checkpoint_name=KEPT,
    )  # fmt: skip
    # It holds which blocks it skips, as arrays: numbers of the program, which no pass keeps for another.
    kernel = jax.tree.structure(make())

    def skips() -> list[Array]:
        return jax.tree.leaves(make())

    def local(q: Array, k: Array, v: Array, *skips: Array) -> Array:
        out: Any = jax.vmap(jax.tree.unflatten(kernel, skips))(q, k, v)
        return out

    scale = head_dim**-0.5 if how.scale is None else how.scale
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    queries, keys = _specs(layout, "BNTH", "BKTH")
    by_head = (jnp.swapaxes(x, 1, 2) for x in (scaled, k, v))
    run = with_gradient(local, (queries, keys, keys), queries, 3, kept=KEPT, constants=skips)
    return jnp.swapaxes(run(*by_head), 1, 2)


def cudnn(q: Array, k: Array, v: Array, *, layout: Layout, window: int | None, how: Scores) -> Array:
    """Attention by cuDNN, each device with its own sequences and heads."""
    local = partial(
        jax.nn.dot_product_attention,
        is_causal=True, scale=how.scale, implementation="cudnn",
        local_window_size=(window - 1, 0) if window else None,
    )  # fmt: skip
    queries, keys = _specs(layout, "BTNH", "BTKH")
    return with_gradient(local, (queries, keys, keys), queries, 3, kept=KEPT)(q, k, v)


def _specs(layout: Layout, *letters: str) -> Iterator[PartitionSpec]:
    """How arrays of these letters are split."""
    return (partition_spec(layout.activation("x", of_one)) for of_one in letters)
