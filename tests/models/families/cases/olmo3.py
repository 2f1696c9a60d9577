from typing import Any

from tests.models.families.case import LOCAL, PLAIN, YARN, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "olmo3": Tiny(
        "Olmo3",
        LOCAL
        | {
            "hidden_size": 48,
            "num_hidden_layers": 5,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
        written="Olmo3ForCausalLM",
    ),
}
