from typing import Any

from tests.models.families.case import LLAMA3_ROPE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "apertus": Tiny("Apertus", {"rope_parameters": LLAMA3_ROPE}, written="ApertusForCausalLM"),
}
