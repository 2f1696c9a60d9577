from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "olmoe": Tiny(
        "Olmoe",
        {"hidden_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 0.5},
        written="OlmoeForCausalLM",
    ),
}
