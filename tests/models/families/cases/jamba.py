from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {
    "jamba": Tiny(
        "Jamba",
        {
            "head_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 3,
            "mamba_d_state": 6,
            "mamba_dt_rank": 5,
            "mamba_proj_bias": True,
        },
        written="JambaForCausalLM",
        split="daily",
    )
}
