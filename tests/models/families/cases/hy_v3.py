from typing import Any

from tests.models.families.case import MOE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "hy_v3": Tiny(
        "HYV3",
        MOE
        | {
            "num_experts": 8,
            "router_scaling_factor": 2.5,
        },
        written="HYV3ForCausalLM",
        nightly=True,
    ),
}
