from meshwright.models.families.common import LAYER, fused_experts
from meshwright.models.families.family import Family, Key
from meshwright.models.families.granitemoe import GRANITE_MOE_KEYS, GRANITE_MOE_TENSORS
from meshwright.models.families.rope import Rope

FAMILY = Family(
    "granitemoeshared",
    "Granite 3 (experts, some shared)",
    ("GraniteMoeSharedForCausalLM",),
    keys=GRANITE_MOE_KEYS | {"shared_intermediate_size": Key("moe.d_ff_shared", None)},
    sets={"moe.num_shared_experts": 1},
    groups=(Rope(),),
    tensors=GRANITE_MOE_TENSORS
    | fused_experts(f"{LAYER}.shared_mlp", "input_linear", "output_linear", "U", "shared"),
)
