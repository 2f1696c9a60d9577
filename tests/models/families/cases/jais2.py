from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "jais2": Tiny("Jais2", {"hidden_size": 48}, written="Jais2ForCausalLM", nightly=True),
}
