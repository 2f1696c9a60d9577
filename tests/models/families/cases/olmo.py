from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "olmo": Tiny(
        "Olmo", {"clip_qkv": 0.5, "num_attention_heads": 8, "hidden_size": 48}, written="OlmoForCausalLM"
    ),
}
