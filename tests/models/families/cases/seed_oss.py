from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "seed-oss-36b": {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_out_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "max_position_embeddings": 524288,
        "mlp_bias": False,
        "model_type": "seed_oss",
        "num_attention_heads": 80,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "residual_dropout": 0.1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 155136,
    },
}
TINY = {
    # LLaMA's class has one key for both biases of attention, Qwen2's computes the same.
    "seed_oss": Tiny("SeedOss", {}, written="Qwen2ForCausalLM"),
    "seed_oss_biased": Tiny("SeedOss", {"mlp_bias": True}, written="SeedOssForCausalLM"),
}
