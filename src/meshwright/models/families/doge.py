from collections.abc import Mapping
from math import isqrt
from typing import Any

from meshwright.models.families.by_layer import ByLayer, matrix, vector
from meshwright.models.families.family import Family, Key, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, PLANNED_POSITIONS, ROUTER


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    extras = (
        *(vector(f"{part}_sum", "D") for part in ("attention", "mlp")),
        vector("attention_bias_scale", "K"),
        vector("attention_bias", "KHv", v=fields["num_kv_heads"]),
    )
    if given.get("is_moe"):
        # Each expert is a row of two tables, chosen by two keys.
        num_experts = given.get("num_experts", 16_384)
        extras += (matrix("router_keys", "Do", "D", o=2 * isqrt(num_experts)),)
        extras += tuple(vector(f"w_{part}_rows", "qD", q=num_experts) for part in ("up", "down"))
    return {"extras": extras}


FAMILY = Family(
    "doge",
    "Doge",
    ("DogeForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | PLANNED_POSITIONS
    | ROUTER
    | {"mlp_bias": Key("mlp_bias", False)}
    | ignored("training only", "hidden_dropout")
    | ignored("as its mask says", "keep_window_size", "sliding_window")
    | ignored("of its table of experts", "norm_topk_prob", "num_experts_per_tok"),
    sets={"qk_norm": True, "planned_only": "dynamic masks (Doge)"},
    groups=(ByLayer(_read, {"is_moe": ("extras",), "num_experts": ("extras",)}),),
    tensors={},
    is_written=False,
)
