from typing import Any

from tests.models.families.case import GRANITE, LOCAL, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "granitemoe_swa": Tiny(
        "GraniteMoeSWA",
        LOCAL
        | GRANITE
        | {
            "hidden_size": 48,
            "num_hidden_layers": 5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        written="GraniteMoeSWAForCausalLM",
        nightly=True,
    ),
}
