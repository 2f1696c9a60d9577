from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "bloom-7b1": {
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["BloomForCausalLM"],
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "hidden_dropout": 0.0,
        "hidden_size": 4096,
        "layer_norm_epsilon": 1e-05,
        "masked_softmax_fusion": True,
        "model_type": "bloom",
        "n_head": 32,
        "n_inner": None,
        "n_layer": 30,
        "offset_alibi": 100,
        "pretraining_tp": 4,
        "seq_length": 2048,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "slow_but_exact": False,
        "vocab_size": 250880,
    },
}
TINY = {
    "bloom": Tiny(
        "Bloom",
        {"hidden_size": 48, "n_head": 12, "n_layer": 3, "seq_length": 64},
        written="BloomForCausalLM",
        split="nightly",
        own_names=True,
    ),
}
