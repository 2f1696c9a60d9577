from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "ernie4_5_moe": Tiny(
        "Ernie4_5_Moe",
        {"hidden_size": 48, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24, "use_bias": False},
        written="Ernie4_5_MoeForCausalLM",
    ),
}
