from meshwright.models.families.family import Family, Key, ignored, needed, without
from meshwright.models.families.keys import ACTIVATION, LLAMA_KEYS, PLANNED_POSITIONS
from meshwright.models.families.releases import published, release

_KEYS = without(LLAMA_KEYS, "num_hidden_layers", "hidden_act")

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
                "D=2560, F=7168, K=8, H=80", "2.4B", num_layers=30, tie_word_embeddings=True
            ),
            "exaone-3.5-7.8b": published("D=4096, F=14_336, K=8", "7.8B", num_layers=32),
            "exaone-3.5-32b": published("D=5120, F=27_392, N=40, K=8", "32.0B", num_layers=64),
        },
        shared={"num_attention_heads": 32, "vocab_size": 102_400, "max_position_embeddings": 32_768},
    ),
)
