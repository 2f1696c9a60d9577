from meshwright.models.families.family import Family, Key, without
from meshwright.models.families.keys import ATTENTION_BIAS, LAYER_NORM_EPS, LLAMA_KEYS, activation
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "jais2",
    "Jais 2",
    ("Jais2ForCausalLM",),
    keys=without(LLAMA_KEYS, "rms_norm_eps")
    | ATTENTION_BIAS
    | LAYER_NORM_EPS
    | activation("relu2")
    | {"attention_bias": Key(("qkv_bias", "attention_out_bias"), True), "mlp_bias": Key("mlp_bias", True)},
    sets={"norm": "layer", "norm_bias": True, "gated": False},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
)
