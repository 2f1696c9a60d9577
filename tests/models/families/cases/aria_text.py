from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "aria_text": Tiny(
        "AriaText",
        {
            "moe_num_experts": 8,
            "pad_token_id": None,
        },
        written="AriaTextForCausalLM",
        nightly=True,
        model="AriaTextForCausalLM",
    ),
}
