from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "gpt-neox-20b": {
        "architectures": ["GPTNeoXForCausalLM"],
        "attention_probs_dropout_prob": 0,
        "hidden_act": "gelu_fast",
        "hidden_dropout_prob": 0,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": 64,
        "num_hidden_layers": 44,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "vocab_size": 50432,
    },
}
TINY = {
    "gpt_neox": Tiny(
        "GPTNeoX",
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "head_dim": 16,
            "rotary_pct": 0.5,
        },
        written="GPTNeoXForCausalLM",
    ),
}
