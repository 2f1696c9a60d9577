from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {
    "mamba": Tiny(
        "Mamba",
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 6},
        own_names=True,
        written="MambaForCausalLM",
        nightly=True,
    )
}
