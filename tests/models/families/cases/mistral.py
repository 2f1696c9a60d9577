from typing import Any

from tests.models.families.case import LOCAL, Tiny

HUB: dict[str, dict[str, Any]] = {
    "mistral-7b-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
}
TINY = {
    "local": Tiny("Mistral", LOCAL, nightly=True),
}
