from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {
    "recurrent_gemma": Tiny(
        "RecurrentGemma",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "attention_window_size": 7,
            "logits_soft_cap": 20.0,
            "lru_width": 32,  # transformers keeps inputs of a convolution for the model's width
            "w_init_variance_scale": 0.2,
            "tie_word_embeddings": True,
        },
        own_names=True,
        written="RecurrentGemmaForCausalLM",
        split="daily",
    )
}
