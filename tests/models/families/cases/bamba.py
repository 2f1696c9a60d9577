from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {
    "bamba": Tiny(
        "Bamba",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 6,
            "head_dim": 4,
        },
        written="BambaForCausalLM",
        split="nightly",
    )
}
