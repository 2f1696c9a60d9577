from typing import Any

from tests.models.families.case import LOCAL, Tiny

HUB: dict[str, dict[str, Any]] = {
    "starcoder2-7b": {
        "architectures": ["Starcoder2ForCausalLM"],
        "attention_dropout": 0.1,
        "embedding_dropout": 0.1,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 4608,
        "intermediate_size": 18432,
        "max_position_embeddings": 16384,
        "mlp_type": "default",
        "model_type": "starcoder2",
        "norm_epsilon": 1e-05,
        "norm_type": "layer_norm",
        "num_attention_heads": 36,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "residual_dropout": 0.1,
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "use_bias": True,
        "vocab_size": 49152,
    },
}
TINY = {
    "starcoder2": Tiny("Starcoder2", LOCAL, written="Starcoder2ForCausalLM", split="nightly"),
}
