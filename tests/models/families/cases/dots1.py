from typing import Any

from tests.models.families.case import MOE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "dots1": Tiny(
        "Dots1",
        MOE
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        written="Dots1ForCausalLM",
    ),
}
