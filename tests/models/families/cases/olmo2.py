from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "olmo2": Tiny("Olmo2", {"hidden_size": 48}, written="Olmo2ForCausalLM"),
}
