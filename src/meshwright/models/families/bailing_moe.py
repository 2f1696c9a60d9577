from meshwright.models.families.family import Family, Fixed, Key, fixed, ignored, needed, without
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LLAMA_KEYS, MTP, PLANNED_POSITIONS

_EXPERTS = ("n_routed_experts", "n_shared_experts")
_RENAMED = without(DEEPSEEK_EXPERTS, *_EXPERTS)

FAMILY = Family(
    "bailing_moe",
    "Ling, Ring 1, 1.5, 2.0",
    ("BailingMoeV2ForCausalLM", "BailingMoeForCausalLM"),
    model_types=("bailing_moe", "bailing_moe_v2"),
    keys=LLAMA_KEYS
    | PLANNED_POSITIONS
    | _RENAMED
    | MTP
    | {
        "num_experts": needed("moe.num_experts"),
        "num_shared_experts": Key("moe.num_shared_experts", 0),
        "moe_shared_expert_intermediate_size": Key("moe.d_ff_shared"),
        "norm_topk_prob": Key("moe.normalized", True),
        "use_bias": Key(("attention_out_bias", "mlp_bias"), False),
        "use_qkv_bias": Key("qkv_bias", False),
        "use_qk_norm": Key("qk_norm", False),
        "score_function": Key("moe.score", "softmax"),
        "moe_router_enable_expert_bias": Key("moe.choice_bias", False),
    }
    | fixed(use_rmsnorm=True, moe_router_enable_shared_expert=True, norm_softmax=False, multi_gate=False)
    | {"use_sliding_window": Fixed((False,)), "norm_head": Fixed((False, True))}
    | ignored("counts only with use_sliding_window", "sliding_window", "max_window_layers")
    | ignored("training only", "embedding_dropout", "output_dropout", "mtp_loss_scaling_factor")
    | ignored("planned only, and positions change no plan", "rotary_dim")
    | ignored("how transformers runs it", "router_dtype"),
    sets={"planned_only": "names of weights in files with their own code (Ling)"},
    groups=(),
    tensors={},
    is_written=False,
)
