from typing import Any

from tests.models.families.case import ALTERNATING, LOCAL, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "ministral": Tiny(
        "Ministral",
        LOCAL | {"num_hidden_layers": 4, "layer_types": ALTERNATING[:4]},
        written="MinistralForCausalLM",
        nightly=True,
    ),
}
