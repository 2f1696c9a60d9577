from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "biogpt": Tiny("BioGpt", {"pad_token_id": None}, written="BioGptForCausalLM", nightly=True),
}
