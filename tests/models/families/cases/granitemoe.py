from typing import Any

from tests.models.families.case import GRANITE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "granitemoe": Tiny(
        "GraniteMoe",
        GRANITE | {"hidden_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2},
        written="GraniteMoeForCausalLM",
        nightly=True,
    ),
}
