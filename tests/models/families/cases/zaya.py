from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {}
COUNTED: dict[str, dict[str, Any]] = {
    "zaya": {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid"],
        "sliding_window": 64,
    }
}
