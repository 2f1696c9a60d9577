from typing import Any

from tests.models.families.case import MOE, Tiny

HUB: dict[str, dict[str, Any]] = {
    "dots.llm1": {
        "architectures": ["Dots1ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 32768,
        "model_type": "dots1",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_experts_per_tok": 6,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
        "scoring_func": "noaux_tc",
    },
}
TINY = {
    "dots1": Tiny(
        "Dots1",
        MOE
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        written="Dots1ForCausalLM",
    ),
}
