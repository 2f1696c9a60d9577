from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "bitnet": Tiny("BitNet", {"hidden_size": 48}, written="BitNetForCausalLM"),
}
