from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {}
COUNTED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": None,
        },
    }
}
