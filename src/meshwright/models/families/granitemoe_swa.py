from meshwright.models.families.family import Family, Tensor, fixed
from meshwright.models.families.granite_swa import LAYER_THETAS, SINKS
from meshwright.models.families.granitemoe import GRANITE_MOE_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, fused_experts

_MOE = f"{LAYER}.block_sparse_moe"

FAMILY = Family(
    "granitemoe_swa",
    "Granite Swash (experts)",
    ("GraniteMoeSWAForCausalLM",),
    keys=GRANITE_MOE_KEYS | fixed(shared_intermediate_size=0),
    sets={"attention_sinks": True},
    groups=(LocalLayers(window=128, global_every=4), Rope(), LAYER_THETAS),
    tensors=LLAMA_TENSORS
    | SINKS
    | {
        "router": Tensor(f"{_MOE}.router.weight", ("E", "D")),
        **fused_experts(f"{_MOE}.experts", "gate_up_proj", "down_proj", suffix=""),
    },
)
