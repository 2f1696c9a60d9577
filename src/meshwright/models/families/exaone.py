from meshwright.models.families.family import Family, Key, ignored, needed
from meshwright.models.families.keys import ACTIVATION, LLAMA_KEYS, PLANNED_POSITIONS
from meshwright.models.families.releases import published, release

_KEYS = {key: rule for key, rule in LLAMA_KEYS.items() if key not in ("num_hidden_layers", "hidden_act")}

FAMILY = Family(
    "exaone",
    "EXAONE 3, 3.5, Deep",
    ("ExaoneForCausalLM",),
    keys=_KEYS
    | PLANNED_POSITIONS
    | {
        "num_layers": needed("num_layers", "num_hidden_layers"),
        "layer_norm_epsilon": Key("norm_eps", 1e-5),
        "rms_norm_eps": Key("norm_eps", 1e-5),
        "activation_function": Key("activation", "silu", form=ACTIVATION),
    }
    | ignored("training only", "embed_dropout"),
    sets={"planned_only": "names of weights in files with their own code (EXAONE 3)"},
    tensors={},
    groups=(),
    is_written=False,
    releases=release(
        "LG AI Research 2024, https://arxiv.org/abs/2412.04862; config.json of LGAI-EXAONE/EXAONE-3.5-*",
        {
            "exaone-3.5-2.4b": published(
                "2.4B",
                num_layers=30,
                hidden_size=2560,
                intermediate_size=7168,
                num_key_value_heads=8,
                head_dim=80,
                tie_word_embeddings=True,
            ),
            "exaone-3.5-7.8b": published(
                "7.8B", num_layers=32, hidden_size=4096, intermediate_size=14_336, num_key_value_heads=8
            ),
            "exaone-3.5-32b": published(
                "32.0B",
                num_layers=64,
                hidden_size=5120,
                intermediate_size=27_392,
                num_attention_heads=40,
                num_key_value_heads=8,
            ),
        },
        shared={"num_attention_heads": 32, "vocab_size": 102_400, "max_position_embeddings": 32_768},
    ),
)
