from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {
    "mamba2": Tiny(
        "Mamba2",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 6,
            "n_groups": 4,
            "use_bias": True,
        },
        own_names=True,
        written="Mamba2ForCausalLM",
        split="nightly",
    )
}
