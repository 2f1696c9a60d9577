from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "gpt_neox": Tiny(
        "GPTNeoX",
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "head_dim": 16,
            "rotary_pct": 0.5,
        },
        written="GPTNeoXForCausalLM",
    ),
}
