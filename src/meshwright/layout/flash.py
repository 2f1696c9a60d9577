"""How attention of whole sequences runs: by a flash kernel of the platform, or by XLA's own operations.

The kernels are JAX's splash attention on TPUs and cuDNN's on NVIDIA's GPUs. Where they have none, and on
CPUs, scores are computed a block at a time.
"""

from functools import cache, lru_cache
from math import ceil, log

from meshwright.layout import Layout
from meshwright.layout.moves.attention import attention_layout, uses_ring
from meshwright.models.config import ModelConfig, Window

# The minor dimension of a TPU's tiles: splash attention takes positions by so many, and wants heads so wide.
TPU_LANES = 128
# Queries and keys of a block at most.
BLOCK = 512
# And where positions are few.
SMALL_BLOCK = 128
_CUDNN_DTYPES = ("bf16", "f16")
# The widest heads that cuDNN's kernels take: from Hopper on, and before.
_HOPPER, _HOPPER_HEAD, _CUDNN_HEAD = 9.0, 256, 128


def why_no_flash(
    kind: str, capability: float | None, config: ModelConfig, layout: Layout, seq_len: int
) -> str | None:
    """Why attention of whole sequences runs no flash kernel on chips of a kind; None if it does.

    kind: tpu, gpu or cpu. capability: of an NVIDIA GPU, its compute capability; None of others. seq_len:
    tokens of a sequence. Besides, documents packed into a sequence have none on GPUs, and with chunks none on
    TPUs: their masks are the data's. The widths of heads are those that jax.nn.dot_product_attention checks.
    """
    if kind == "cpu":
        return "CPUs have none"
    split = attention_layout(layout).activation("q", "BTNH").axes_of("T")
    reasons = {"the model has ALiBi": config.positions == "alibi"}
    if kind == "tpu":
        piece = seq_len // (2 * layout.mesh.size(split)) if split else seq_len
        reasons |= {
            f"keys pass round a ring over {', '.join(split)}": uses_ring(layout),
            f"pieces of {piece:,} tokens are not a multiple of {TPU_LANES}": piece % TPU_LANES != 0,
        }
    else:
        dtype, width = layout.precision.compute_dtype, config.d_head
        widest = _HOPPER_HEAD if capability and capability >= _HOPPER else _CUDNN_HEAD
        reasons |= {
            "no compute_capability of an NVIDIA GPU is given, and cuDNN runs on these alone": capability
            is None,
            f"positions are split over {', '.join(split)}": bool(split),
            "the model has attention sinks": config.attention_sinks,
            f"cuDNN has none for {dtype}": dtype not in _CUDNN_DTYPES,
            f"cuDNN has none for heads of {width}": width % 8 != 0 or width > widest,
            "cuDNN has none with a softcap": config.attention_softcap is not None,
            f"cuDNN has none for chunks of {config.attention_chunk} tokens": has_chunks(config, seq_len),
        }
    return next((reason for reason, holds in reasons.items() if holds), None)


@cache
def attention_block(positions: int) -> int:
    """Queries, or keys, of a block where XLA's operations take so many positions of a device block by block.

    All blocks are alike, as the positions divide; of an even number there are two at least, as the halves of
    a zigzag are. They are about an eighth of the positions long, so that what a block holds is little beside
    what a device does, or as near as that is to between SMALL_BLOCK and BLOCK.

    >>> [attention_block(positions) for positions in (64, 1024, 4096, 1280, 1000, 101)]
    [32, 128, 512, 160, 125, 101]
    """
    whole = positions // 2 if positions % 2 == 0 else positions
    wanted = min(max(positions // 8, SMALL_BLOCK), BLOCK)
    sizes = [size for size in range(1, min(whole, 4 * BLOCK)) if whole % size == 0]
    return min([*sizes, whole], key=lambda size: abs(log(size / wanted)))


def has_chunks(config: ModelConfig, seq_len: int) -> bool:
    """Whether some layer sees less of a sequence of so many tokens than all before, since it sees chunks."""
    return config.attention_chunk is not None and config.attention_chunk < seq_len


@lru_cache(maxsize=1024)
def visible_pairs(num_blocks: float, block: int, window: Window | None) -> float:
    """Pairs of a block of queries and one of keys in which some query sees some key, of num_blocks^2.

    Positions of queries and keys are the same, under the causal mask and a window if there is one.

    >>> visible_pairs(4, 32, None), visible_pairs(4, 32, Window(32)), visible_pairs(4, 32, Window(1))
    (10.0, 7.0, 4.0)
    >>> visible_pairs(5, 32, Window(64, chunked=True)), visible_pairs(4, 32, Window(48, chunked=True))
    (7.0, 6.0)
    """
    if window and window.chunked and window.size < num_blocks * block:
        # In a chunk that begins within a block, that block's first query sees those of the chunk before.
        first_met = (window.first(number * block) // block for number in range(ceil(num_blocks)))
        met = sum(number + 1 - first for number, first in enumerate(first_met))
        return met * num_blocks / ceil(num_blocks)
    reach = num_blocks - 1
    if window and not window.chunked:
        reach = min(reach, -(-(window.size - 1) // block))
    return (reach + 1) * (num_blocks - reach / 2)


def window_block(window: Window) -> int:
    """Queries and keys of a block of a TPU's kernel where each query sees a window of keys.

    No wider than the window, since whole blocks are computed.

    >>> window_block(Window(128)), window_block(Window(300)), window_block(Window(4096))
    (128, 256, 512)
    """
    return max(TPU_LANES, min(BLOCK, 1 << (window.size.bit_length() - 1)))


def has_narrow_values(config: ModelConfig) -> bool:
    """Whether values are narrower than queries and keys, as of latents."""
    return config.mla is not None and config.mla.value_dim < config.d_head
