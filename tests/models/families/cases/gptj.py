from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "gpt-j-6b": {
        "activation_function": "gelu_new",
        "architectures": ["GPTJForCausalLM"],
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "gradient_checkpointing": False,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gptj",
        "n_embd": 4096,
        "n_head": 16,
        "n_inner": None,
        "n_layer": 28,
        "n_positions": 2048,
        "resid_pdrop": 0.0,
        "rotary": True,
        "rotary_dim": 64,
        "scale_attn_weights": True,
        "tie_word_embeddings": False,
        "vocab_size": 50400,
    },
}
TINY = {
    "gptj": Tiny(
        "GPTJ",
        {
            "n_embd": 64,
            "n_head": 8,
            "n_layer": 3,
            "n_positions": 64,
            "rotary_dim": 4,
        },
        written="GPTJForCausalLM",
        own_names=True,
    ),
}
