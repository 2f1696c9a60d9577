from typing import Any

from tests.models.families.case import ALTERNATING, LOCAL, Tiny

HUB: dict[str, dict[str, Any]] = {
    "command-r7b": {
        "architectures": ["Cohere2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 132096,
        "model_type": "cohere2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_theta": 50000,
        "vocab_size": 256000,
        "cache_implementation": "hybrid",
        "head_dim": 128,
        "layer_norm_eps": 1e-05,
        "layer_switch": 4,
        "logit_scale": 0.25,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rope_scaling": None,
        "rotary_pct": 1.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    },
}
TINY = {
    "cohere2": Tiny(
        "Cohere2",
        LOCAL
        | {"num_hidden_layers": 4, "logit_scale": 0.5, "layer_types": ALTERNATING[:4], "pad_token_id": None},
        written="Cohere2ForCausalLM",
    ),
}
