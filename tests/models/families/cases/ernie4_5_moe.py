from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "ernie-4.5-21b-a3b": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "max_position_embeddings": 131072,
        "model_type": "ernie4_5_moe",
        "num_attention_heads": 20,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 103424,
        "moe_capacity": [64, 64, 64],
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_use_aux_free": True,
        "num_nextn_predict_layers": 1,
        "use_bias": False,
    },
}
TINY = {
    "ernie4_5_moe": Tiny(
        "Ernie4_5_Moe",
        {"hidden_size": 48, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24, "use_bias": False},
        written="Ernie4_5_MoeForCausalLM",
    ),
}
