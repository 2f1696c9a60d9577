from meshwright.models.families.family import Family, Key, Tensor, fixed, ignored, needed
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, EXPERTS, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts, linear, norms

FAMILY = Family(
    "afmoe",
    "Trinity (AFMoE)",
    ("AfmoeForCausalLM",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | ATTENTION_BIAS
    | EXPERTS
    | {
        "head_dim": Key("d_head", 128),
        "num_experts": needed("moe.num_experts", "num_local_experts"),
        "moe_intermediate_size": needed("moe.d_ff"),
        "num_shared_experts": Key("moe.num_shared_experts", 2),
        "num_dense_layers": Key("moe.num_dense_layers", 1),
        "route_scale": Key("moe.scaling", 1.0),
        "mup_enabled": Key("scale_embedding", False),
    }
    | fixed(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1, num_expert_groups=1)
    | fixed(num_limited_groups=1)
    | ignored("training only", "load_balance_coeff")
    | ignored("how transformers runs it", "use_grouped_mm"),
    sets={
        "post_norms": True,
        "qk_norm": True,
        "attention_gate": True,
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
    },
    groups=(
        LocalLayers(window=1024, global_every=4, pattern=("global_attn_every_n_layers",), unturned=True),
        Rope(),
    ),
    tensors=LLAMA_TENSORS
    | norms("attention_post_norm", f"{LAYER}.post_attention_layernorm")
    | norms("mlp_norm", f"{LAYER}.pre_mlp_layernorm")
    | norms("mlp_post_norm", f"{LAYER}.post_mlp_layernorm")
    | linear("wg", f"{LAYER}.self_attn.gate_proj", "NH", "D")
    | experts()
    | {
        "router": Tensor(f"{LAYER}.mlp.router.gate.weight", ("E", "D")),
        "router_choice_bias": Tensor(f"{LAYER}.mlp.expert_bias", ("E",)),
    },
)
