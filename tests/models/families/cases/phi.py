from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "phi": Tiny("Phi", {"hidden_size": 64, "head_dim": 8}, written="PhiForCausalLM"),
}
