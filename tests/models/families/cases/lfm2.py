from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {
    "lfm2": Tiny(
        "Lfm2",
        {
            "layer_types": ["conv", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "head_dim": 4,
        },
        written="Lfm2ForCausalLM",
        split="nightly",
    )
}
