from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "persimmon": Tiny(
        "Persimmon",
        {
            "hidden_size": 64,
            "head_dim": 8,
        },
        written="PersimmonForCausalLM",
        nightly=True,
    ),
}
