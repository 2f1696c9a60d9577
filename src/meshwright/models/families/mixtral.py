from meshwright.models.families.family import Family, needed
from meshwright.models.families.keys import EPS_1E_5, EXPERTS, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts
from meshwright.models.families.tool_formats import MISTRAL_CALLS

FAMILY = Family(
    "mixtral",
    "Mixtral",
    ("MixtralForCausalLM",),
    keys=LLAMA_KEYS | EPS_1E_5 | EXPERTS | {"intermediate_size": needed(("d_ff", "moe.d_ff"))},
    groups=(LocalLayers(), Rope(theta=1e6)),
    tensors=LLAMA_TENSORS | experts(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2")),
    tool_calls=MISTRAL_CALLS,
)
