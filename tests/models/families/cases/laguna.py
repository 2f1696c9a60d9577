from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {}
COUNTED: dict[str, dict[str, Any]] = {
    "laguna": {"num_hidden_layers": 4, "num_experts": 16, "num_attention_heads_per_layer": [48, 32, 32, 48]}
}
