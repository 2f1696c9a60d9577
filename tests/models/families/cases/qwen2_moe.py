from typing import Any

from tests.models.families.case import MOE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "qwen2_moe": Tiny(
        "Qwen2Moe",
        MOE
        | {
            "hidden_size": 48,
            "num_experts": 8,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
        },
        written="Qwen2MoeForCausalLM",
    ),
}
