from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "nemotron": Tiny("Nemotron", {"head_dim": 8, "mlp_bias": True}, written="NemotronForCausalLM"),
}
