from typing import Any

from tests.models.families.case import Tiny

_SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 3}
HUB: dict[str, dict[str, Any]] = {
    "falcon-7b": {
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0,
        "bias": False,
        "hidden_dropout": 0.0,
        "hidden_size": 4544,
        "layer_norm_epsilon": 1e-05,
        "model_type": "falcon",
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "parallel_attn": True,
        "vocab_size": 65024,
    },
    "falcon-40b": {
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0,
        "bias": False,
        "hidden_dropout": 0.0,
        "hidden_size": 8192,
        "layer_norm_epsilon": 1e-05,
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "num_kv_heads": 8,
        "parallel_attn": True,
        "vocab_size": 65024,
    },
}
TINY = {
    # One KV head cannot be split, so it is not written from a mesh.
    "falcon": Tiny("Falcon", _SIZES, own_names=True),
    "falcon-grouped": Tiny(
        "Falcon",
        _SIZES | {"new_decoder_architecture": True, "num_kv_heads": 4, "bias": True},
        written="FalconForCausalLM",
        own_names=True,
        split="nightly",
    ),
    "falcon-serial": Tiny(
        "Falcon",
        _SIZES | {"parallel_attn": False, "multi_query": False},
        written="FalconForCausalLM",
        own_names=True,
        nightly=True,
    ),
}
