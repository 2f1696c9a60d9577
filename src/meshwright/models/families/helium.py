from meshwright.models.families.family import Family, Key
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, in_pairs

FAMILY = Family(
    "helium",
    "Helium",
    ("HeliumForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | {
        "head_dim": Key("d_head", 128),
        "rms_norm_eps": Key("norm_eps", 1e-8),
        "mlp_bias": Key("mlp_bias", False),
    },
    groups=(Rope(),),
    tensors=LLAMA_TENSORS | in_pairs(LLAMA_TENSORS, "wq", "wk", "wq_bias", "wk_bias"),
)
