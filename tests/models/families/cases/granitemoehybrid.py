from typing import Any

from tests.models.families.case import GRANITE, Tiny

HUB: dict[str, dict[str, Any]] = {}
_HYBRID = {
    "hidden_size": 48,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 6,
    "shared_intermediate_size": 24,
}
TINY = {
    "granitemoehybrid": Tiny(
        "GraniteMoeHybrid",
        GRANITE | _HYBRID | {"num_local_experts": 8, "num_experts_per_tok": 2},
        written="GraniteMoeHybridForCausalLM",
        split="nightly",
    ),
    "granitemoehybrid_dense": Tiny(
        "GraniteMoeHybrid",
        GRANITE | _HYBRID | {"num_local_experts": 0, "num_experts_per_tok": 0},
        written="GraniteMoeHybridForCausalLM",
    ),
}
