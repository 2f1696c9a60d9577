from typing import Any

from tests.models.families.case import DENSE_MLA, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "minicpm3": Tiny(
        "MiniCPM3",
        DENSE_MLA
        | {
            "q_lora_rank": 16,
            "dim_model_base": 16,
        },
        written="MiniCPM3ForCausalLM",
    ),
}
