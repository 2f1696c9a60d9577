from typing import Any

from tests.models.families.case import GRANITE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "hyperclovax": Tiny(
        "HyperCLOVAX",
        GRANITE
        | {
            "hidden_size": 48,
        },
        written="HyperCLOVAXForCausalLM",
        nightly=True,
    ),
}
