from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "arcee": Tiny("Arcee", {"mlp_bias": True}, written="ArceeForCausalLM", nightly=True),
}
