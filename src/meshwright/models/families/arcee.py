from meshwright.models.families.family import Family, Key
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS, activation
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "arcee",
    "Arcee AFM",
    ("ArceeForCausalLM",),
    keys=LLAMA_KEYS | EPS_1E_5 | ATTENTION_BIAS | activation("relu2") | {"mlp_bias": Key("mlp_bias", False)},
    sets={"gated": False},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
)
