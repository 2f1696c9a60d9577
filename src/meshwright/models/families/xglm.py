from meshwright.models.families.family import Family, Key, ignored, needed
from meshwright.models.families.keys import ACTIVATION

FAMILY = Family(
    "xglm",
    "XGLM",
    ("XGLMForCausalLM",),
    keys={
        "num_layers": needed("num_layers", "num_hidden_layers"),
        "d_model": needed("d_model", "hidden_size"),
        "ffn_dim": needed("d_ff", "intermediate_size"),
        "attention_heads": needed("num_heads", "num_attention_heads"),
        "vocab_size": needed("vocab_size"),
        "max_position_embeddings": needed("max_seq_len"),
        "scale_embedding": Key("scale_embedding", True),
        "tie_word_embeddings": Key("tied_embeddings", True),
        "activation_function": Key("activation", "gelu", form=ACTIVATION),
    }
    | ignored("training only", "dropout", "activation_dropout", "layerdrop", "init_std"),
    sets={
        "norm": "layer",
        "norm_bias": True,
        "positions": "none",
        "gated": False,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "planned_only": "sinusoidal positions (XGLM)",
    },
    groups=(),
    tensors={},
    is_written=False,
)
