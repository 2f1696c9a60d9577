from meshwright.models.families.common import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS, LLAMA_TENSORS, activation
from meshwright.models.families.family import Family, Key
from meshwright.models.families.rope import Rope

FAMILY = Family(
    "arcee",
    "Arcee AFM",
    ("ArceeForCausalLM",),
    keys=LLAMA_KEYS | EPS_1E_5 | ATTENTION_BIAS | activation("relu2") | {"mlp_bias": Key("mlp_bias", False)},
    sets={"gated": False},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
)
