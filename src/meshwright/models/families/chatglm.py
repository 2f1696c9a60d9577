from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, Key, fixed, ignored, needed


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    shares = given.get("multi_query_attention", True)
    num_kv_heads = given.get("multi_query_group_num", 2) if shares else fields["num_heads"]
    return {"num_kv_heads": num_kv_heads, "d_head": given.get("kv_channels") or fields["d_head"]}


FAMILY = Family(
    "chatglm",
    "ChatGLM 2, 3, GLM-4-9B (own code)",
    ("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    keys={
        "num_layers": needed("num_layers", "num_hidden_layers"),
        "hidden_size": needed("d_model"),
        "ffn_hidden_size": needed("d_ff"),
        "num_attention_heads": needed("num_heads"),
        "padded_vocab_size": needed("vocab_size"),
        "seq_length": needed("max_seq_len"),
        "layernorm_epsilon": Key("norm_eps", 1e-5),
        "add_qkv_bias": Key("qkv_bias", True),
        "tie_word_embeddings": Key("tied_embeddings", False),
    }
    | fixed(
        add_bias_linear=False,
        rmsnorm=True,
        apply_residual_connection_post_layernorm=False,
        post_layer_norm=True,
        prefix_projection=False,
    )
    | ignored("planned only, and positions change no plan", "original_rope", "rope_ratio")
    | ignored(
        "how transformers runs it",
        "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion",
        "fp32_residual_connection", "interleaved_qkv", "quantization_bit", "pre_seq_len",
    )
    | ignored("training only", "hidden_dropout", "classifier_dropout")
    | ignored("the same as padded_vocab_size", "vocab_size"),
    sets={"planned_only": "names of weights in files with their own code (ChatGLM)"},
    groups=(
        ByLayer(
            _read,
            {
                "multi_query_attention": ("num_kv_heads",),
                "multi_query_group_num": ("num_kv_heads",),
                "kv_channels": ("d_head",),
            },
        ),
    ),
    tensors={},
    is_written=False,
)  # fmt: skip
