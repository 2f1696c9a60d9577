from meshwright.models.families.family import Family, Key, Tensor, needed
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, ROUTER
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts

_FC1 = f"{LAYER}.mlp.experts.fc1.weight"

FAMILY = Family(
    "aria_text",
    "Aria (text)",
    ("AriaTextForCausalLM",),
    wrappers=("aria",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | ROUTER
    | {
        "intermediate_size": needed(("d_ff", "moe.d_ff")),
        "moe_num_experts": Key("moe.num_experts", 8),
        "moe_topk": Key("moe.experts_per_token", 2),
        "moe_num_shared_experts": Key("moe.num_shared_experts", 2),
        "mlp_bias": Key("mlp_bias", False),
    },
    groups=(Rope(),),
    tensors=LLAMA_TENSORS
    | experts()
    | {
        "router": Tensor(f"{LAYER}.mlp.router.weight", ("E", "D")),
        "expert_gate": Tensor(_FC1, ("E", "D", "M"), 2, ("M", "M"), 0),
        "expert_in": Tensor(_FC1, ("E", "D", "M"), 2, ("M", "M"), 1),
        "expert_out": Tensor(f"{LAYER}.mlp.experts.fc2.weight", ("E", "M", "D")),
    },
)
