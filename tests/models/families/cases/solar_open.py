from typing import Any

from tests.models.families.case import MOE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "solar_open": Tiny(
        "SolarOpen",
        MOE
        | {
            "n_routed_experts": 8,
        },
        written="SolarOpenForCausalLM",
        nightly=True,
    ),
}
