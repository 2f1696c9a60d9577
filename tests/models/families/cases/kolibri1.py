from typing import Any

from tests.models.families.case import LOCAL, MOE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "kolibri1": Tiny(
        "Kolibri1",
        LOCAL
        | MOE
        | {
            "num_hidden_layers": 6,
            "num_experts": 8,
            "shared_expert_intermediate_size": 40,
        },
        written="Kolibri1ForCausalLM",
        nightly=True,
    ),
}
