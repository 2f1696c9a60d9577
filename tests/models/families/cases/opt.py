from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "opt": Tiny("OPT", {"ffn_dim": 48, "init_std": 0.2}, written="OPTForCausalLM"),
}
