from meshwright.models.families.family import Family, Key, ignored
from meshwright.models.families.keys import LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "seed_oss",
    "Seed-OSS",
    ("SeedOssForCausalLM",),
    keys=LLAMA_KEYS
    | {
        "attention_bias": Key("qkv_bias", True),
        "attention_out_bias": Key("attention_out_bias", False),
        "mlp_bias": Key("mlp_bias", False),
        "head_dim": Key("d_head", 128),
    }
    | ignored("training only", "residual_dropout"),
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
)
