from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {}
COUNTED: dict[str, dict[str, Any]] = {
    kind: {"num_hidden_layers": 2} for kind in ("bert", "roberta", "camembert", "ernie")
}
