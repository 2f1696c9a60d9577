from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {
    "gpt_neox_japanese": Tiny(
        "GPTNeoXJapanese",
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "head_dim": 16,
            "intermediate_multiple_size": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
        split="nightly",
    ),
}
COUNTED: dict[str, dict[str, Any]] = {"gpt_neox_japanese": {"num_hidden_layers": 2}}
