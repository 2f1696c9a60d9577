from meshwright.models.families.family import Family, Rule, Tensor, needed
from meshwright.models.families.keys import ATTENTION_BIAS, EXPERTS, LLAMA_KEYS, MULTIPLIERS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, fused_experts

_MOE = f"{LAYER}.block_sparse_moe"
GRANITE_MOE_KEYS: dict[str, Rule] = (
    LLAMA_KEYS | ATTENTION_BIAS | MULTIPLIERS | EXPERTS | {"intermediate_size": needed(("d_ff", "moe.d_ff"))}
)
GRANITE_MOE_TENSORS = (
    LLAMA_TENSORS
    | {"router": Tensor(f"{_MOE}.router.layer.weight", ("E", "D"))}
    | fused_experts(_MOE, "input_linear", "output_linear")
)

FAMILY = Family(
    "granitemoe",
    "Granite 3 (experts)",
    ("GraniteMoeForCausalLM",),
    keys=GRANITE_MOE_KEYS,
    groups=(Rope(),),
    tensors=GRANITE_MOE_TENSORS,
)
