from typing import Any

from tests.models.families.case import MLA, MOE, YARN, Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "mistral4": Tiny(
        "Mistral4",
        MOE
        | {key: value for key, value in MLA.items() if key != "head_dim"}
        | {
            "head_dim": 10,
            "q_lora_rank": 16,
            "n_group": 1,
            "rope_parameters": YARN
            | {
                "llama_4_scaling_beta": 0.5,
                "partial_rotary_factor": 0.4,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
        model="Mistral4ForCausalLM",
        nightly=True,
    ),
}
