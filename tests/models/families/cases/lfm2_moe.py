from typing import Any

from tests.models.families.case import MOE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {
    "lfm2_moe": Tiny(
        "Lfm2Moe",
        MOE
        | {
            "num_experts": 8,
            "num_dense_layers": 1,
            "head_dim": 4,
            "layer_types": ["conv", "conv", "full_attention"],
        },
        nightly=True,
    )
}
