from meshwright.models.families.family import Family, Key, Tensor, fixed, needed
from meshwright.models.families.keys import LLAMA_KEYS, NO_LOCAL_LAYERS, ROUTER
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts
from meshwright.models.families.tool_formats import HERMES

FAMILY = Family(
    "qwen2_moe",
    "Qwen 1.5 and 2 MoE",
    ("Qwen2MoeForCausalLM",),
    keys=LLAMA_KEYS
    | NO_LOCAL_LAYERS
    | ROUTER
    | {
        "num_experts": needed("moe.num_experts", "num_local_experts"),
        "num_experts_per_tok": needed("moe.experts_per_token"),
    }
    | fixed(mlp_only_layers=[])
    | {
        "moe_intermediate_size": needed("moe.d_ff"),
        "shared_expert_intermediate_size": needed("moe.d_ff_shared"),
        "decoder_sparse_step": Key("moe.every", 1),
        "norm_topk_prob": Key("moe.normalized", False),
        "qkv_bias": Key("qkv_bias", True),
    },
    sets={"moe.num_shared_experts": 1, "moe.shared_gate": True},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS
    | experts(shared="shared_expert")
    | {"shared_router": Tensor(f"{LAYER}.mlp.shared_expert_gate.weight", ("", "D"))},
    tool_calls=HERMES,
)
