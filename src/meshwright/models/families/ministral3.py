from meshwright.models.families.family import Family, Key
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import MISTRAL_CALLS

FAMILY = Family(
    "ministral3",
    "Ministral 3",
    ("Ministral3ForCausalLM",),
    keys=LLAMA_KEYS | EPS_1E_5 | {"head_dim": Key("d_head", 128)},
    groups=(LocalLayers(), Rope(theta=1e6, temperature=True)),
    tensors=LLAMA_TENSORS,
    tool_calls=MISTRAL_CALLS,
)
