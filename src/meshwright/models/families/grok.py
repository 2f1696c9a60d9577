from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, Key, fixed, ignored, needed, without
from meshwright.models.families.keys import EPS_1E_5, EXPERTS, LLAMA_KEYS, PLANNED_POSITIONS


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Grok 2 adds a dense feed-forward to its experts, which counts as a shared expert."""
    moe = dict(vars(fields["moe"]))
    if given.get("residual_moe"):
        moe |= {"num_shared_experts": 1, "d_ff_shared": fields["d_ff"]}
    moe["d_ff"] = given.get("moe_intermediate_size") or fields["d_ff"]
    return {"moe": type(fields["moe"])(**moe)}


FAMILY = Family(
    "grok",
    "Grok 1, 2",
    ("Grok1ForCausalLM", "Grok1ModelForCausalLM"),
    model_types=("grok-1", "grok"),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | PLANNED_POSITIONS
    | without(EXPERTS, "num_local_experts")
    | {
        "intermediate_size": needed(("d_ff", "moe.d_ff")),
        "num_experts": needed("moe.num_experts", "num_local_experts"),
        "final_logit_softcapping": Key("logit_softcap", null_is_none=True),
        "attn_logit_softcapping": Key("attention_softcap", 30.0, also=("max_attn_value",)),
        "embedding_multiplier_scale": Key("embedding_scale", 1.0),
        "output_multiplier_scale": Key("logit_scale", 1.0),
        "hidden_act": Key("activation", "gelu"),
    }
    | fixed(global_attn_every_n=1)
    | ignored("of the scale of scores", "attn_output_multiplier", "attn_temperature_len")
    | ignored("a cap of the router's logits", "router_logit_softcapping")
    | ignored("off in its releases", "sliding_window_size"),
    sets={"post_norms": True, "planned_only": "caps of the router's logits (Grok)"},
    groups=(ByLayer(_read, {"residual_moe": ("moe",), "moe_intermediate_size": ("moe.d_ff",)}),),
    tensors={},
    is_written=False,
)
