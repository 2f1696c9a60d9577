from meshwright.models.families.family import Family, Key, Tensor, ignored, without
from meshwright.models.families.keys import LLAMA_KEYS, activation
from meshwright.models.families.tensors import linear, norms

_LAYER = "biogpt.layers.{}"
_NOT_READ = ("rms_norm_eps", "num_key_value_heads", "head_dim")

FAMILY = Family(
    "biogpt",
    "BioGPT",
    ("BioGptForCausalLM",),
    keys=without(LLAMA_KEYS, *_NOT_READ)
    | activation("gelu")
    | ignored("all heads have keys, D / N wide", "head_dim", "num_key_value_heads")
    | {
        "layer_norm_eps": Key("norm_eps", 1e-12),
        "scale_embedding": Key("scale_embedding", True),
        "tie_word_embeddings": Key("tied_embeddings", True),
    }
    | ignored("training only", "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop")
    | ignored("training only", "activation_dropout"),
    sets={
        "norm": "layer",
        "norm_bias": True,
        "positions": "learned",
        "position_offset": 2,
        "gated": False,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    groups=(),
    tensors={
        "embed": Tensor("biogpt.embed_tokens.weight", ("V", "D")),
        "positions": Tensor("biogpt.embed_positions.weight", ("W", "D")),
        **norms("attention_norm", f"{_LAYER}.self_attn_layer_norm"),
        **linear("wq", f"{_LAYER}.self_attn.q_proj", "NH", "D"),
        **linear("wk", f"{_LAYER}.self_attn.k_proj", "KH", "D"),
        **linear("wv", f"{_LAYER}.self_attn.v_proj", "KH", "D"),
        **linear("wo", f"{_LAYER}.self_attn.out_proj", "D", "NH"),
        **norms("mlp_norm", f"{_LAYER}.final_layer_norm"),
        **linear("w_in", f"{_LAYER}.fc1", "F", "D"),
        **linear("w_out", f"{_LAYER}.fc2", "D", "F"),
        **norms("final_norm", "biogpt.layer_norm"),
        "unembed": Tensor("output_projection.weight", ("V", "D")),
    },
)
