from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "glm-4-32b-0414": {
        "architectures": ["Glm4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "intermediate_size": 23040,
        "max_position_embeddings": 32768,
        "model_type": "glm4",
        "num_attention_heads": 48,
        "num_hidden_layers": 61,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151552,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
    },
}
TINY = {
    "glm4": Tiny("Glm4", {"head_dim": 8, "pad_token_id": None}, written="Glm4ForCausalLM"),
}
