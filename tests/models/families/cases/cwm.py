from typing import Any

from tests.models.families.case import LOCAL, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "cwm": Tiny("Cwm", LOCAL | {"num_hidden_layers": 5}, written="MinistralForCausalLM", nightly=True),
}
