from meshwright.models.families.family import Family, Form, Key
from meshwright.models.families.keys import ATTENTION_BIAS, FACTOR, LLAMA_KEYS, MULTIPLIERS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, norms

# No factor means the usual one.
_QUERY_SCALE = Form(write=lambda value, model: value or model.d_head**-0.5)

FAMILY = Family(
    "hyperclovax",
    "HyperCLOVA X SEED",
    ("HyperCLOVAXForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | MULTIPLIERS
    | {
        "attention_multiplier": Key("query_scale", form=_QUERY_SCALE),
        "logits_scaling": Key("logit_scale", 1.0, form=FACTOR),
        "mlp_bias": Key("mlp_bias", False),
        "use_post_norm": Key("post_norms", True),
    },
    groups=(Rope(),),
    tensors=LLAMA_TENSORS
    | norms("attention_post_norm", f"{LAYER}.post_norm1")
    | norms("mlp_post_norm", f"{LAYER}.post_norm2"),
)
