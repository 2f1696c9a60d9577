from typing import Any

from tests.models.families.case import ALTERNATING, LOCAL, MOE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "afmoe": Tiny(
        "Afmoe",
        LOCAL
        | MOE
        | {
            "num_hidden_layers": 4,
            "layer_types": ALTERNATING[:4],
            "num_experts": 8,
            "num_shared_experts": 1,
            "route_scale": 2.0,
            "mup_enabled": True,
        },
        written="AfmoeForCausalLM",
    ),
}
