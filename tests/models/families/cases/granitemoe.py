from typing import Any

from tests.models.families.case import GRANITE, Tiny

HUB: dict[str, dict[str, Any]] = {
    "granite-3.1-3b-a800m": {
        "architectures": ["GraniteMoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "max_position_embeddings": 131072,
        "model_type": "granitemoe",
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "num_experts_per_tok": 8,
        "num_local_experts": 40,
        "output_router_logits": False,
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.0,
    },
}
TINY = {
    "granitemoe": Tiny(
        "GraniteMoe",
        GRANITE | {"hidden_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2},
        written="GraniteMoeForCausalLM",
        nightly=True,
    ),
}
