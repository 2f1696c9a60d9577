from collections.abc import Mapping
from typing import Any

from meshwright.models.config_tables import RopeScaling
from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, Key, Tensor, fixed, ignored, needed
from meshwright.models.families.tensors import QKV, fused, in_pairs, linear, norms

_LAYER = "transformer.encoder.layers.{}"
_HEADS = fused(("wq", "wk", "wv"), f"{_LAYER}.self_attention.query_key_value", QKV)


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    shares = given.get("multi_query_attention", True)
    num_kv_heads = given.get("multi_query_group_num", 2) if shares else fields["num_heads"]
    d_head = given.get("kv_channels") or fields["d_head"]
    read = {"num_kv_heads": num_kv_heads, "d_head": d_head, "rotary_dim": d_head // 2}  # half of a head turns
    ratio = given.get("rope_ratio") or 1
    # ChatGLM 2 divides positions by the ratio. ChatGLM 3 and GLM-4 multiply the base by it. Files with the
    # same keys differ only in their names.
    if "chatglm2" in str(given.get("_name_or_path")).lower() and ratio != 1:
        return read | {"rope_theta": 10_000.0, "rope_scaling": RopeScaling(ratio, kind="linear")}
    return read | {"rope_theta": 10_000.0 * ratio}


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
        original_rope=True,
    )
    | ignored(
        "how transformers runs it",
        "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion",
        "fp32_residual_connection", "interleaved_qkv", "quantization_bit", "pre_seq_len",
    )
    | ignored("training only", "hidden_dropout", "classifier_dropout")
    | ignored("the same as padded_vocab_size", "vocab_size"),
    groups=(
        ByLayer(
            _read,
            {
                "multi_query_attention": ("num_kv_heads",),
                "multi_query_group_num": ("num_kv_heads",),
                "kv_channels": ("d_head", "rotary_dim"),
                "rope_ratio": ("rope_theta", "rope_scaling"),
            },
        ),
    ),
    tensors={
        "embed": Tensor("transformer.embedding.word_embeddings.weight", ("V", "D")),
        **norms("attention_norm", f"{_LAYER}.input_layernorm"),
        **_HEADS,
        **in_pairs(_HEADS, "wq", "wk", "wq_bias", "wk_bias"),
        **linear("wo", f"{_LAYER}.self_attention.dense", "D", "NH"),
        **norms("mlp_norm", f"{_LAYER}.post_attention_layernorm"),
        **fused(("w_gate", "w_in"), f"{_LAYER}.mlp.dense_h_to_4h", ("F", "F")),
        **linear("w_out", f"{_LAYER}.mlp.dense_4h_to_h", "D", "F"),
        **norms("final_norm", "transformer.encoder.final_layernorm"),
        "unembed": Tensor("transformer.output_layer.weight", ("V", "D")),
    },
    unread=("transformer.rotary_pos_emb.inv_freq",),
    is_written=False,
)  # fmt: skip
