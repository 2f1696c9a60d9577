from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "glm": Tiny("Glm", {"head_dim": 8, "pad_token_id": None}, written="GlmForCausalLM"),
}
