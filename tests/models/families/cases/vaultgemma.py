from typing import Any

from tests.models.families.case import ALTERNATING, LOCAL, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "vaultgemma": Tiny(
        "VaultGemma",
        LOCAL | {"num_hidden_layers": 4, "layer_types": ALTERNATING[:4], "attn_logit_softcapping": 2.0},
        written="VaultGemmaForCausalLM",
        nightly=True,
    ),
}
