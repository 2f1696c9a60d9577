from typing import Any

from tests.models.families.case import ALTERNATING, LOCAL, Tiny

HUB: dict[str, dict[str, Any]] = {
    "exaone-4.0-32b": {
        "architectures": ["Exaone4ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 27392,
        "max_position_embeddings": 131072,
        "model_type": "exaone4",
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 102400,
        "head_dim": 128,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    }
}
TINY = {
    "exaone4": Tiny(
        "Exaone4",
        LOCAL | {"num_hidden_layers": 4, "layer_types": ALTERNATING[:4]},
        written="Exaone4ForCausalLM",
    ),
}
