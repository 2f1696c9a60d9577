from typing import Any

from tests.models.families.case import GRANITE, LOCAL, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "granite_swa": Tiny(
        "GraniteSWA",
        LOCAL
        | GRANITE
        | {
            "hidden_size": 48,
            "num_hidden_layers": 5,
        },
        written="GraniteSWAForCausalLM",
        nightly=True,
    ),
}
