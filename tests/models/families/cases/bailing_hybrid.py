from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {}
COUNTED: dict[str, dict[str, Any]] = {"bailing_hybrid": {"num_hidden_layers": 7, "num_local_experts": 16}}
