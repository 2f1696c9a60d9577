from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {}
COUNTED: dict[str, dict[str, Any]] = {"glm5_next_text": {"num_hidden_layers": 5, "n_routed_experts": 8}}
