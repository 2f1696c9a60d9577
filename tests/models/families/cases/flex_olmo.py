from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "flex_olmo": Tiny(
        "FlexOlmo",
        {"hidden_size": 48, "num_experts": 8, "pad_token_id": None, "num_experts_per_tok": 2},
        written="FlexOlmoForCausalLM",
        nightly=True,
    ),
}
