from typing import Any

from tests.models.families.case import Tiny

_SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 3}
HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "falcon": Tiny("Falcon", _SIZES, written="FalconForCausalLM", own_names=True),
    "falcon-grouped": Tiny(
        "Falcon",
        _SIZES | {"new_decoder_architecture": True, "num_kv_heads": 4, "bias": True},
        written="FalconForCausalLM",
        own_names=True,
        split="nightly",
    ),
    "falcon-serial": Tiny(
        "Falcon",
        _SIZES | {"parallel_attn": False, "multi_query": False},
        written="FalconForCausalLM",
        own_names=True,
        nightly=True,
    ),
}
