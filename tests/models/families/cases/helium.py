from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "helium": Tiny("Helium", {"hidden_size": 48}, written="LlamaForCausalLM", nightly=True),
}
