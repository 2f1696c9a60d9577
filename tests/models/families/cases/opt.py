from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "opt-1.3b": {
        "_remove_final_layer_norm": False,
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0,
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "ffn_dim": 8192,
        "hidden_size": 2048,
        "init_std": 0.02,
        "layerdrop": 0.0,
        "max_position_embeddings": 2048,
        "model_type": "opt",
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "prefix": "</s>",
        "vocab_size": 50272,
        "word_embed_proj_dim": 2048,
    },
}
TINY = {
    "opt": Tiny("OPT", {"ffn_dim": 48, "init_std": 0.2}, written="OPTForCausalLM"),
}
