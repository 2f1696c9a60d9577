from typing import Any

from tests.models.families.case import LLAMA3_ROPE, Tiny

HUB: dict[str, dict[str, Any]] = {
    "apertus-8b": {
        "architectures": ["ApertusForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "xielu",
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "max_position_embeddings": 65536,
        "model_type": "apertus",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 12000000,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
        "hidden_dropout": 0.0,
        "mlp_bias": False,
        "post_norm": False,
        "qk_norm": True,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
            "type": "llama3",
        },
    }
}
TINY = {
    "apertus": Tiny("Apertus", {"rope_parameters": LLAMA3_ROPE}, written="ApertusForCausalLM"),
}
