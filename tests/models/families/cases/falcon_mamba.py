from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {
    "falcon_mamba": Tiny(
        "FalconMamba",
        {
            "hidden_size": 32,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "state_size": 6,
            "time_step_rank": 5,
            "use_bias": True,
            "mixer_rms_eps": 1e-3,
            "tie_word_embeddings": False,
        },
        own_names=True,
        written="FalconMambaForCausalLM",
        split="daily",
    )
}
