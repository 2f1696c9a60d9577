from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {}
COUNTED: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "num_hidden_layers": 12,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 96,
    }
}
