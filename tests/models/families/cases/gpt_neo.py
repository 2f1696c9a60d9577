from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "gpt_neo": Tiny(
        "GPTNeo",
        {
            "hidden_size": 48,
            "num_heads": 8,
            "num_layers": 3,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local", "local"], 1]],
            "window_size": 5,
        },
        written="GPTNeoForCausalLM",
        nightly=True,
        own_names=True,
    ),
}
