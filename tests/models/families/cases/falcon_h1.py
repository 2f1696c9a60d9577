from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
_MIXER = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 4,
    "head_dim": 4,
}
# Powers of two, so that weights written and read again are the same.
_MULTIPLIERS = {
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 0.25,
    "embedding_multiplier": 2.5,
    "key_multiplier": 2.0,
    "lm_head_multiplier": 1.5,
    "mlp_multipliers": [0.5, 0.25],
    "ssm_in_multiplier": 2.0,
    "ssm_multipliers": [0.5, 0.25, 4.0, 0.125, 0.5],
    "ssm_out_multiplier": 0.25,
}
TINY: dict[str, Tiny] = {
    "falcon_h1": Tiny("FalconH1", _MIXER | _MULTIPLIERS, written="FalconH1ForCausalLM", split="nightly"),
    "falcon_h1_norm": Tiny(
        "FalconH1",
        _MIXER | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1},
        nightly=True,
    ),
}
