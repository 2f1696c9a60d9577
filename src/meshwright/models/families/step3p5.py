from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, by_layer, listed, matrix
from meshwright.models.families.family import Family, Fixed, Key, Rule, ignored, needed, without
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS, MTP


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers = fields["num_layers"]
    types = listed(given, "layer_types", "full_attention", num_layers)
    local_heads = given.get("num_sliding_attention_heads")
    local_heads = local_heads or (given.get("attention_other_setting") or {}).get("num_attention_heads")
    layers = [
        {
            "sliding_window": given.get("sliding_window") if kind == "sliding_attention" else None,
            "num_heads": (kind == "sliding_attention" and local_heads) or fields["num_heads"],
        }
        for kind in types
    ]
    with_experts = range(given.get("first_k_dense_replace", 3), num_layers)
    if numbers := given.get("moe_layers_enum"):
        with_experts = [int(n) for n in (numbers.split(",") if isinstance(numbers, str) else numbers)]
    kinds = given.get("mlp_layer_types") or [
        "sparse" if number in with_experts else "dense" for number in range(num_layers)
    ]
    feed_forwards = tuple("experts" if kind == "sparse" else "dense" for kind in kinds)[:num_layers]
    return {"feed_forwards": feed_forwards, "extras": (matrix("head_gates", "DN", "D"),)} | by_layer(layers)


_KEYS: dict[str, Rule] = without(LLAMA_KEYS, "hidden_act")

FAMILY = Family(
    "step3p5",
    "Step-3.5, Step-3.7",
    ("Step3p5ForCausalLM", "Step3p7FlashForCausalLM"),
    model_types=("step3p5", "step3p7"),
    wrappers=("step3p7",),
    keys=_KEYS
    | EPS_1E_5
    | ATTENTION_BIAS
    | MTP
    | {
        "num_key_value_heads": Key("num_kv_heads", 8, also=("num_attention_groups",)),
        "max_position_embeddings": needed("max_seq_len", "max_seq_len"),
        "n_routed_experts": needed("moe.num_experts", "num_experts", "moe_num_experts", "num_local_experts"),
        "num_experts_per_tok": Key("moe.experts_per_token", 8, also=("moe_top_k",)),
        "moe_intermediate_size": needed("moe.d_ff"),
        "share_expert_dim": Key("moe.d_ff_shared", 1280, also=("share_expert_dims",)),
        "n_shared_experts": Key("moe.num_shared_experts", 1),
        "moe_router_scaling_factor": Key("moe.scaling", 1.0),
        "scoring_func": Fixed(("sigmoid",)),
        "moe_router_activation": Fixed(("sigmoid",)),
        "use_moe_router_bias": Fixed((True,)),
        "mlp_bias": Fixed((False,)),
        "use_head_wise_attn_gate": Fixed((True,)),
        "use_moe": Fixed((True,)),
        "use_qk_norm": Fixed((True,)),
    }
    | ignored(
        "planned only, and positions change no plan",
        "rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factors", "use_rope_layers",
        "yarn_only_types",
    )
    | ignored("planned only: its activation", "hidden_act", "swiglu_limits", "swiglu_limits_shared")
    | ignored("planned only: a factor of scores", "query_pre_attn_scalar")
    | ignored("of the modules that predict further tokens", "mtp_layer_types", "mtp_mlp_layer_types")
    | ignored("as layer_types says", "per_layer_config", "use_bidirectional_attention", "att_impl_type")
    | ignored("how transformers runs it", "need_fp32_gate", "sink", "norm_expert_weight")
    | ignored("training only", "output_router_logits"),
    sets={
        "qk_norm": True,
        "norm_offset": True,
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
        "planned_only": "a gate for each head (Step-3.5)",
    },
    groups=(
        ByLayer(
            _read,
            {
                "layer_types": ("sliding_window",),
                "sliding_window": ("sliding_window",),
                "num_sliding_attention_heads": ("variants",),
                "attention_other_setting": ("variants",),
                "mlp_layer_types": ("feed_forwards",),
                "moe_layers_enum": ("feed_forwards",),
                "first_k_dense_replace": ("feed_forwards",),
            },
        ),
    ),
    tensors={},
    is_written=False,
)  # fmt: skip
