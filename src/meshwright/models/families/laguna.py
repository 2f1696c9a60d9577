from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, by_layer, listed, matrix
from meshwright.models.families.family import Family, Fixed, Key, ignored, needed
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, NUM_EXPERTS


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers = fields["num_layers"]
    types = listed(given, "layer_types", "full_attention", num_layers)
    heads = listed(given, "num_attention_heads_per_layer", fields["num_heads"], num_layers)
    mlps = given.get("mlp_layer_types") or ["dense"] + ["sparse"] * (num_layers - 1)
    window = given.get("sliding_window")
    layers = [
        {"sliding_window": window if kind == "sliding_attention" else None, "num_heads": number}
        for kind, number in zip(types, heads, strict=True)
    ]
    feed_forwards = tuple("experts" if kind == "sparse" else "dense" for kind in mlps)[:num_layers]
    extras = (matrix("head_gates", "DN", "D"),) if given.get("gating", True) else ()
    return {"feed_forwards": feed_forwards, "extras": extras} | by_layer(layers)


FAMILY = Family(
    "laguna",
    "Laguna",
    ("LagunaForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | NUM_EXPERTS
    | {
        "moe_intermediate_size": needed("moe.d_ff"),
        "shared_expert_intermediate_size": Key("moe.d_ff_shared", 512),
        "moe_routed_scaling_factor": Key("moe.scaling", 1.0),
        "moe_apply_router_weight_on_input": Fixed((False,)),
        "moe_router_logit_softcapping": Fixed((0.0, None)),
    }
    | ignored(
        "planned only, and positions change no plan",
        "rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor",
    ),
    sets={
        "qk_norm": True,
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
        "moe.num_shared_experts": 1,
        "planned_only": "a gate for each head (Laguna)",
    },
    groups=(
        ByLayer(
            _read,
            {
                "layer_types": ("sliding_window",),
                "sliding_window": ("sliding_window",),
                "num_attention_heads_per_layer": ("variants",),
                "mlp_layer_types": ("feed_forwards",),
                "gating": ("extras",),
            },
        ),
    ),
    tensors={},
    is_written=False,
)  # fmt: skip
