from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "ernie-4.5-0.3b": {
        "architectures": ["Ernie4_5ForCausalLM"],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 131072,
        "model_type": "ernie4_5",
        "num_attention_heads": 16,
        "num_hidden_layers": 18,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "vocab_size": 103424,
    },
}
TINY = {
    # Rotary positions turn neighbouring elements; in another order of rows it is LLaMA.
    "ernie4_5": Tiny("Ernie4_5", {"use_bias": True}, written="LlamaForCausalLM", split="nightly"),
}
