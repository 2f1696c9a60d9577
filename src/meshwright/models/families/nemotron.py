from meshwright.models.families.family import Family, Key, without
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, activation
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "nemotron",
    "Nemotron 4, Minitron",
    ("NemotronForCausalLM",),
    keys=without(LLAMA_KEYS, "rms_norm_eps")
    | ATTENTION_BIAS
    | activation("relu2")
    | {"norm_eps": Key("norm_eps", 1e-5), "mlp_bias": Key("mlp_bias", False)},
    sets={"norm": "layer", "norm_bias": True, "norm_offset": True, "gated": False},
    groups=(Rope(share=0.5),),
    tensors=LLAMA_TENSORS,
)
