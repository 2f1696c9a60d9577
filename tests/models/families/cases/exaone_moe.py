from typing import Any

from tests.models.families.case import ALTERNATING, LOCAL, MOE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "exaone_moe": Tiny(
        "ExaoneMoe",
        LOCAL
        | MOE
        | {
            "num_hidden_layers": 4,
            "layer_types": ALTERNATING[:4],
            "num_experts": 8,
            "n_group": 2,
            "topk_group": 1,
        },
        written="ExaoneMoeForCausalLM",
    ),
}
