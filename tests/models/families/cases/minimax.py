from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {
    "minimax": Tiny(
        "MiniMax",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "full_attn_alpha_factor": 1.5,
            "linear_attn_alpha_factor": 2.0,
            "mlp_alpha_factor": 0.5,
        },
        written="MiniMaxForCausalLM",
        split="daily",
    )
}
