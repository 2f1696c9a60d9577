from meshwright.models.families.family import Family, Key, ignored, needed, without
from meshwright.models.families.gptj import GPTJ_KEYS

_NOT_READ = ("n_inner", "rotary_dim", "activation_function")

FAMILY = Family(
    "ctrl",
    "CTRL",
    ("CTRLLMHeadModel",),
    keys=without(GPTJ_KEYS, *_NOT_READ)
    | {"dff": needed("d_ff"), "tie_word_embeddings": Key("tied_embeddings", True)}
    | ignored("it has none", "n_inner", "rotary_dim", "activation_function"),
    sets={
        "norm": "layer",
        "norm_bias": True,
        "positions": "none",
        "gated": False,
        "activation": "relu",
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "planned_only": "sinusoidal positions (CTRL)",
    },
    groups=(),
    tensors={},
    is_written=False,
)
