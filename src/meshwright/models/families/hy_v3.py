from meshwright.models.families.family import Family, Key, Tensor, ignored, needed
from meshwright.models.families.keys import EPS_1E_5, EXPERTS, LLAMA_KEYS
from meshwright.models.families.layers import ExpertLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts

FAMILY = Family(
    "hy_v3",
    "Hunyuan 3",
    ("HYV3ForCausalLM",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | EXPERTS
    | {
        "attention_bias": Key(("qkv_bias", "attention_out_bias"), False),
        "head_dim": Key("d_head", 128),
        "mlp_bias": Key("mlp_bias", False),
        "num_experts": needed("moe.num_experts", "num_local_experts"),
        "moe_intermediate_size": needed("moe.d_ff"),
        "num_shared_experts": Key("moe.num_shared_experts", 1),
        "router_scaling_factor": Key("moe.scaling", 2.826),
    }
    | ignored("how transformers runs it", "enable_moe_fp32_combine"),
    sets={"qk_norm": True, "moe.score": "sigmoid", "moe.choice_bias": True},
    groups=(ExpertLayers(), Rope(theta=11_158_840.0)),
    tensors=LLAMA_TENSORS
    | experts(shared="shared_mlp")
    | {
        "router": Tensor(f"{LAYER}.mlp.router.gate.weight", ("E", "D")),
        "router_choice_bias": Tensor(f"{LAYER}.mlp.expert_bias", ("E",)),
    },
    more_layers=True,
)
