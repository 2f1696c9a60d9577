from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "minimax-m2.5": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "num_hidden_layers": 62,
        "hidden_size": 3072,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1536,
        "vocab_size": 200064,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "use_mtp": True,
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "shared_intermediate_size": 0,
        "scoring_func": "sigmoid",
    },
}
TINY = {
    "minimax_m2": Tiny(
        "MiniMaxM2",
        {"head_dim": 8, "rotary_dim": 4, "num_local_experts": 8, "num_experts_per_tok": 2},
        written="MiniMaxM2ForCausalLM",
    ),
}
