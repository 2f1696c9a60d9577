from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "stablelm-2-1.6b": {
        "architectures": ["StableLmForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 4096,
        "model_type": "stablelm",
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "use_qkv_bias": True,
        "vocab_size": 100352,
    },
}
TINY = {
    "stablelm": Tiny(
        "StableLm",
        {
            "head_dim": None,
            "num_attention_heads": 4,
            "partial_rotary_factor": 0.5,
            "use_qkv_bias": True,
        },
        written="StableLmForCausalLM",
        split="nightly",
    ),
}
