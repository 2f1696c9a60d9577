from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, Key, Tensor, fixed, ignored, needed
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import HEAD, QKV, feed_forward, fused, linear, norms

_LAYER = "transformer.h.{}"


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
    | ignored("training only", "attn_dropout_prob", "emb_dropout_prob")
    | ignored(
        "how transformers runs it",
        "bf16", "fp16", "fp32", "onnx_safe", "use_flash_attn", "use_cache_quantization", "use_cache_kernel",
        "softmax_in_fp32",
    ),
    sets={"qkv_bias": True},
    groups=(ByLayer(_read, {"kv_channels": ("d_head",)}), Rope()),
    tensors={
        "embed": Tensor("transformer.wte.weight", ("V", "D")),
        **norms("attention_norm", f"{_LAYER}.ln_1"),
        **fused(("wq", "wk", "wv"), f"{_LAYER}.attn.c_attn", QKV),
        **linear("wo", f"{_LAYER}.attn.c_proj", "D", "NH"),
        **norms("mlp_norm", f"{_LAYER}.ln_2"),
        # The product with w2 is the gate.
        **feed_forward("w", f"{_LAYER}.mlp", "F", ("w2", "w1", "c_proj")),
        **norms("final_norm", "transformer.ln_f"),
    }
    | HEAD,
    is_written=False,
)  # fmt: skip
