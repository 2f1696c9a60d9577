from meshwright.models.families.common import LAYER, LLAMA_TENSORS
from meshwright.models.families.family import Family, Tensor, fixed
from meshwright.models.families.granite_swa import LAYER_THETAS, SINKS
from meshwright.models.families.granitemoe import GRANITE_MOE_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope

_MOE = f"{LAYER}.block_sparse_moe"
_GATE_UP = f"{_MOE}.experts.gate_up_proj"

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
        "expert_gate": Tensor(_GATE_UP, ("E", "M", "D"), 1, ("M", "M"), 0),
        "expert_in": Tensor(_GATE_UP, ("E", "M", "D"), 1, ("M", "M"), 1),
        "expert_out": Tensor(f"{_MOE}.experts.down_proj", ("E", "D", "M")),
    },
)
