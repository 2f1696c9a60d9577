from meshwright.models.families.family import Family, Ignored, Tensor, needed
from meshwright.models.families.keys import NUM_EXPERTS
from meshwright.models.families.qwen3_5 import QWEN3_5_GROUPS, QWEN3_5_KEYS, QWEN3_5_SETS
from meshwright.models.families.state_layers import GATED_QUERIES, SPLIT_DELTA_TENSORS
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts
from meshwright.models.families.tool_formats import HERMES

FAMILY = Family(
    "qwen3_5_moe",
    "Qwen3.5-MoE (text)",
    ("Qwen3_5MoeForCausalLM",),
    model_types=("qwen3_5_moe_text",),
    wrappers=("qwen3_5_moe",),
    keys=QWEN3_5_KEYS
    | NUM_EXPERTS
    | {
        "intermediate_size": Ignored("its layers all have experts"),
        "moe_intermediate_size": needed(("moe.d_ff", "d_ff")),
        "shared_expert_intermediate_size": needed("moe.d_ff_shared"),
    },
    sets=QWEN3_5_SETS | {"moe.num_shared_experts": 1, "moe.shared_gate": True},
    groups=QWEN3_5_GROUPS,
    tensors=LLAMA_TENSORS
    | GATED_QUERIES
    | SPLIT_DELTA_TENSORS
    | experts(shared="shared_expert")
    | {"shared_router": Tensor(f"{LAYER}.mlp.shared_expert_gate.weight", ("", "D"))},
    more_layers=True,
    tool_calls=HERMES,
)
