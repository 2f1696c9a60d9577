from typing import Any

from tests.models.families.case import GRANITE, Tiny

HUB: dict[str, dict[str, Any]] = {
    "granite-3.3-8b": {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12800,
        "max_position_embeddings": 131072,
        "model_type": "granite",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "mlp_bias": False,
        "residual_multiplier": 0.22,
        "rope_scaling": None,
    },
}
TINY = {
    "granite": Tiny("Granite", GRANITE | {"hidden_size": 48}, written="GraniteForCausalLM"),
}
