from typing import Any

from tests.models.families.case import DENSE_MLA, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "youtu": Tiny("Youtu", DENSE_MLA | {"q_lora_rank": 16}, written="YoutuForCausalLM", nightly=True),
}
