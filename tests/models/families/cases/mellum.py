from typing import Any

from tests.models.families.case import ALTERNATING, LOCAL, MOE, PLAIN, YARN, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "mellum": Tiny(
        "Mellum",
        LOCAL
        | MOE
        | {
            "num_hidden_layers": 4,
            "layer_types": ALTERNATING[:4],
            "num_experts": 8,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
        written="MellumForCausalLM",
        nightly=True,
    ),
}
