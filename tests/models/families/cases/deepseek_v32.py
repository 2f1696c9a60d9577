from typing import Any

from tests.models.families.case import MLA, MOE, YARN, Tiny

HUB: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v32",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}
INDEXER = {"index_n_heads": 12, "index_head_dim": 8, "index_topk": 5}
TINY = {
    "deepseek_v32": Tiny(
        "DeepseekV32",
        MOE
        | MLA
        | INDEXER
        | {
            "q_lora_rank": 16,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "rms_norm_eps": 1e-3,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        },
        written="DeepseekV32ForCausalLM",
        split="daily",
    ),
}
