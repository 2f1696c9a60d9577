from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "cohere": Tiny(
        "Cohere",
        {"hidden_size": 48, "use_qk_norm": True, "logit_scale": 0.5, "pad_token_id": None},
        written="CohereForCausalLM",
    ),
}
