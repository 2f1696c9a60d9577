from typing import Any

from tests.models.families.case import GRANITE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "granite": Tiny("Granite", GRANITE | {"hidden_size": 48}, written="GraniteForCausalLM"),
}
