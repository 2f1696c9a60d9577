from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "glm4": Tiny("Glm4", {"head_dim": 8, "pad_token_id": None}, written="Glm4ForCausalLM"),
}
