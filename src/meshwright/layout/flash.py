"""Where attention of whole sequences runs a flash kernel: JAX's splash attention on TPUs, cuDNN's on GPUs."""

from meshwright.layout import Layout
from meshwright.models.config import ModelConfig

# The minor dimension of a TPU's tiles: splash attention takes positions by so many, and wants heads so wide.
TPU_LANES = 128
_CUDNN_DTYPES = ("bf16", "f16")
_CUDNN_HEAD_DIM = 128


def why_no_flash(kind: str, config: ModelConfig, layout: Layout, seq_len: int) -> str | None:
    """Why attention without a cache runs no flash kernel on chips of a kind (`tpu`, `gpu`); None if it does.

    seq_len: tokens of a sequence. Besides, packed documents have none (their masks are the data's).
    """
    if kind == "cpu":
        return "CPUs have none"
    split = layout.attending.activation("q", "BTNH").axes_of("T")
    mla = config.mla
    reasons = {
        f"positions are split over {', '.join(split)}": bool(split),
        "the model has attention sinks": config.attention_sinks,
        "the model has ALiBi": config.positions == "alibi",
        "queries and values have different widths": mla is not None
        and mla.nope_dim + mla.rope_dim != mla.value_dim,
    }
    if kind == "tpu":
        reasons[f"{seq_len:,} tokens are not a multiple of {TPU_LANES}"] = seq_len % TPU_LANES != 0
    else:
        dtype, width = layout.compute_dtype, config.d_head
        reasons |= {
            f"cuDNN has none for {dtype}": dtype not in _CUDNN_DTYPES,
            f"cuDNN has none for heads of {width}": width % 8 != 0 or width > _CUDNN_HEAD_DIM,
            "cuDNN has none with a softcap": config.attention_softcap is not None,
        }
    return next((reason for reason, holds in reasons.items() if holds), None)
