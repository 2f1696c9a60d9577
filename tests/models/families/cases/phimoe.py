from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "phimoe": Tiny(
        "Phimoe",
        {
            "hidden_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
        written="PhimoeForCausalLM",
    ),
}
