from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "smollm3-3b": {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
}
TINY = {
    "smollm3": Tiny(
        "SmolLM3",
        {"head_dim": 4, "no_rope_layer_interval": 2, "pad_token_id": None},
        written="SmolLM3ForCausalLM",
        split="nightly",
    ),
}
