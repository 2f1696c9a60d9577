from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {}
COUNTED: dict[str, dict[str, Any]] = {
    "minimax_m3_vl_text": {
        "num_hidden_layers": 3,
        "num_local_experts": 8,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }
}
