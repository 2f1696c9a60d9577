from typing import Any

from tests.models.families.case import MLA, MOE, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "axk1": Tiny(
        "AXK1",
        MOE
        | {key: value for key, value in MLA.items() if key != "first_k_dense_replace"}
        | {
            "q_lora_rank": 16,
            "n_group": 2,
            "topk_group": 1,
        },
        written="AXK1ForCausalLM",
        nightly=True,
    ),
}
