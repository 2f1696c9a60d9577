from meshwright.models.families.family import Family, Key, fixed, ignored, without
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, experts

FAMILY = Family(
    "solar_open",
    "Solar Open",
    ("SolarOpenForCausalLM",),
    keys=without(LLAMA_KEYS, "intermediate_size")
    | EPS_1E_5
    | DEEPSEEK_EXPERTS
    | {
        "attention_bias": Key("qkv_bias", False),
        "head_dim": Key("d_head", 128),
        "moe_intermediate_size": Key(("d_ff", "moe.d_ff"), 1280),
        "n_routed_experts": Key("moe.num_experts", 128, also=("num_local_experts",)),
        "n_shared_experts": Key("moe.num_shared_experts", 1),
        "norm_topk_prob": Key("moe.normalized", True),
    }
    | fixed(first_k_dense_replace=0, use_qk_norm=False)
    | ignored("of dense layers, which it has not", "intermediate_size"),
    sets={"moe.score": "sigmoid", "moe.choice_bias": True},
    groups=(Rope(theta=1e6, share=1.0),),
    tensors=LLAMA_TENSORS | experts(),
)
