from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "phi-2": {
        "architectures": ["PhiForCausalLM"],
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "hidden_act": "gelu_new",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "phi",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": False,
        "resid_pdrop": 0.1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 51200,
    },
}
TINY = {
    "phi": Tiny("Phi", {"hidden_size": 64, "head_dim": 8}, written="PhiForCausalLM"),
}
