from typing import Any

from tests.models.families.case import NTK, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "hunyuan_v1_moe": Tiny(
        "HunYuanMoEV1",
        {
            "num_experts": 8,
            "moe_topk": 2,
            "rope_parameters": NTK,
        },
        written="HunYuanMoEV1ForCausalLM",
    ),
}
