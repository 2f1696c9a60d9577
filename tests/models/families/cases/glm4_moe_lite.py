from typing import Any

from tests.models.families.case import MLA, MOE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "glm4_moe_lite": Tiny(
        "Glm4MoeLite",
        MOE
        | {key: value for key, value in MLA.items() if key not in ("head_dim", "first_k_dense_replace")}
        | {
            "q_lora_rank": 16,
            "rms_norm_eps": 1e-6,
        },
        written="Glm4MoeLiteForCausalLM",
        nightly=True,
    ),
}
