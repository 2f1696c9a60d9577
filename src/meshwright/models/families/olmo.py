from meshwright.models.families.family import Family, Key, without
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "olmo",
    "OLMo",
    ("OlmoForCausalLM",),
    keys=without(LLAMA_KEYS, "rms_norm_eps") | ATTENTION_BIAS | {"clip_qkv": Key("clip_qkv")},
    sets={"norm": "layer", "norm_scale": False, "norm_eps": 1e-5},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
)
