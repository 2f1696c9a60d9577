from typing import Any

from tests.models.families.case import YARN, Tiny

HUB: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
}
TINY = {
    "biased": Tiny("Llama", {"attention_bias": True, "mlp_bias": True}, written="LlamaForCausalLM"),
    "linear": Tiny(
        "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}}, nightly=True
    ),
    "dynamic": Tiny(
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 50.0}},
        nightly=True,
    ),
    "yarn": Tiny("Llama", {"rope_parameters": YARN}),
}
