from typing import Any

from tests.models.families.case import YARN, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "ministral3": Tiny(
        "Ministral3",
        {
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.5}
            | {"original_max_position_embeddings": 4},
        },
        written="Ministral3ForCausalLM",
    ),
}
