from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "nanochat": Tiny(
        "NanoChat",
        {
            "hidden_size": 48,
            "final_logit_softcapping": 2.0,
        },
        written="NanoChatForCausalLM",
    ),
}
