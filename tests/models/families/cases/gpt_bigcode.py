from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "gpt_bigcode": Tiny(
        "GPTBigCode",
        {
            "n_embd": 48,
            "n_head": 8,
            "n_layer": 3,
            "n_positions": 64,
        },
        own_names=True,
    ),
}
