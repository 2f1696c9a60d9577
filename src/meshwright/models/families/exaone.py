from meshwright.models.families.family import Family, Key, ignored, needed, without
from meshwright.models.families.keys import ACTIVATION, LLAMA_KEYS, PLANNED_POSITIONS

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
)
