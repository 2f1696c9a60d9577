from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {}
COUNTED: dict[str, dict[str, Any]] = {"gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 4}}
