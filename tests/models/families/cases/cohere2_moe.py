from typing import Any

from tests.models.families.case import ALTERNATING, LOCAL, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "cohere2_moe": Tiny(
        "Cohere2Moe",
        LOCAL
        | {
            "num_hidden_layers": 4,
            "logit_scale": 0.5,
            "layer_types": ALTERNATING[:4],
            "num_experts": 8,
            "pad_token_id": None,
        },
        written="Cohere2MoeForCausalLM",
        nightly=True,
    ),
}
