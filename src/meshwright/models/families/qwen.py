from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, Key, fixed, ignored, needed


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Its file counts both matrices of a gated feed-forward as one width."""
    if fields["d_ff"] % 2:
        raise ModelError(f"{name}: intermediate_size = {fields['d_ff']} is odd; it holds two equal widths")
    return {"d_ff": fields["d_ff"] // 2, "d_head": given.get("kv_channels") or fields["d_head"]}


FAMILY = Family(
    "qwen",
    "Qwen 1",
    ("QWenLMHeadModel",),
    keys={
        "num_hidden_layers": needed("num_layers"),
        "hidden_size": needed("d_model"),
        "num_attention_heads": needed("num_heads"),
        "vocab_size": needed("vocab_size"),
        "intermediate_size": needed("d_ff"),
        "seq_length": Key("max_seq_len", 8192),
        "layer_norm_epsilon": Key("norm_eps", 1e-6),
        "tie_word_embeddings": Key("tied_embeddings", False),
    }
    | fixed(no_bias=True, scale_attn_weights=True, rotary_pct=1.0)
    | ignored(
        "of texts longer than in training", "use_dynamic_ntk", "use_logn_attn", "max_position_embeddings"
    )
    | ignored("planned only, and positions change no plan", "rotary_emb_base")
    | ignored("training only", "attn_dropout_prob", "emb_dropout_prob")
    | ignored(
        "how transformers runs it",
        "bf16", "fp16", "fp32", "onnx_safe", "use_flash_attn", "use_cache_quantization", "use_cache_kernel",
        "softmax_in_fp32",
    ),
    sets={"qkv_bias": True, "planned_only": "names of weights in files with their own code (Qwen 1)"},
    groups=(ByLayer(_read, {"kv_channels": ("d_head",)}),),
    tensors={},
    is_written=False,
)  # fmt: skip
