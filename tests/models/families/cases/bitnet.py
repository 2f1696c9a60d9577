from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "bitnet-b1.58-2b": {
        "architectures": ["BitNetForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "relu2",
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "max_position_embeddings": 4096,
        "model_type": "bitnet",
        "num_attention_heads": 20,
        "num_hidden_layers": 30,
        "num_key_value_heads": 5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
}
TINY = {
    "bitnet": Tiny("BitNet", {"hidden_size": 48}, written="BitNetForCausalLM"),
}
