from meshwright.models.families.family import Family, Key, Tensor, fixed, ignored, needed
from meshwright.models.families.gpt2 import GPT_SETS
from meshwright.models.families.tensors import HEAD, QKV, fused, linear, norms

_H = "transformer.h.{}"

FAMILY = Family(
    "bloom",
    "BLOOM (ALiBi)",
    ("BloomForCausalLM",),
    keys={
        "n_layer": needed("num_layers", "num_hidden_layers"),
        "hidden_size": needed("d_model", "n_embed"),
        "n_head": needed("num_heads", "num_attention_heads"),
        "vocab_size": needed("vocab_size"),
        "seq_length": Key("max_seq_len", 2048),
        "layer_norm_epsilon": Key("norm_eps", 1e-5),
        "tie_word_embeddings": Key("tied_embeddings", True),
    }
    | fixed(apply_residual_connection_post_layernorm=False)
    | ignored("training only", "hidden_dropout")
    | ignored("always four times hidden_size", "n_inner")
    | ignored(
        "how its first code ran it",
        "slow_but_exact",
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "offset_alibi",
        "skip_bias_add",
        "skip_bias_add_qkv",
    ),
    sets=GPT_SETS | {"positions": "alibi", "activation": "gelu", "embedding_norm": True},
    groups=(),
    prefix="transformer.",
    tensors={"embed": Tensor("transformer.word_embeddings.weight", ("V", "D"))}
    | norms("embed_norm", "transformer.word_embeddings_layernorm")
    | norms("attention_norm", f"{_H}.input_layernorm")
    # A head's query, key and value follow each other.
    | fused(("wq", "wk", "wv"), f"{_H}.self_attention.query_key_value", QKV, arranged="within")
    | linear("wo", f"{_H}.self_attention.dense", "D", "NH")
    | norms("mlp_norm", f"{_H}.post_attention_layernorm")
    | linear("w_in", f"{_H}.mlp.dense_h_to_4h", "F", "D")
    | linear("w_out", f"{_H}.mlp.dense_4h_to_h", "D", "F")
    | norms("final_norm", "transformer.ln_f")
    | HEAD,
)
