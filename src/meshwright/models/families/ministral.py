from meshwright.models.families.common import LLAMA_KEYS, LLAMA_TENSORS, MISTRAL_CALLS
from meshwright.models.families.family import Family
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope

FAMILY = Family(
    "ministral",
    "Ministral",
    ("MinistralForCausalLM",),
    keys=LLAMA_KEYS,
    groups=(LocalLayers(window=4096), Rope()),
    tensors=LLAMA_TENSORS,
    tool_calls=MISTRAL_CALLS,
)
