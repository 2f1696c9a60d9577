from meshwright.models.families.family import Family
from meshwright.models.families.keys import LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import MISTRAL_CALLS

FAMILY = Family(
    "ministral",
    "Ministral",
    ("MinistralForCausalLM",),
    keys=LLAMA_KEYS,
    groups=(LocalLayers(window=4096), Rope()),
    tensors=LLAMA_TENSORS,
    tool_calls=MISTRAL_CALLS,
)
