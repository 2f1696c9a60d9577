"""How the tests of a family are described, and values that several families' cases share.

`cases/` has a file for each family, with two tables: HUB, config.json as published, by preset; TINY, models
that transformers makes with random weights, by a name of their own.
"""

from dataclasses import dataclass
from typing import Any, Literal

When = Literal["daily", "nightly"]


@dataclass(frozen=True)
class Tiny:
    """A tiny model that transformers makes.

    config: its class without "Config". changes: keys that differ from SHAPE. model: the class of the model,
    if not that name and "ForCausalLM". written: the class as which we export it; None if that is not tested.
    nightly: a variant of another case, tested every night. split: when its logits are compared on a mesh.
    own_names: its config has its own names for SHAPE's keys. tolerance: of logits, as a share of the
    largest.
    """

    config: str
    changes: dict[str, Any]
    written: str | None = None
    nightly: bool = False
    split: When | None = None
    model: str | None = None
    own_names: bool = False
    # Float32 products in another order, layer upon layer, differ by up to 5e-6 of the largest logit. A
    # window, cap, query scale or theta left out moves them by half of it or more, another gelu by 6e-5.
    tolerance: float = 1e-5

    @property
    def model_class(self) -> str:
        return self.model or f"{self.config}ForCausalLM"


SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    # Ten times the usual, so that the most likely token leads and attention is not uniform.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LOCAL = {"sliding_window": 7}
ALTERNATING = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    "head_dim": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
DENSE_MLA = {
    key: value for key, value in MLA.items() if key not in ("n_routed_experts", "first_k_dense_replace")
}
# A norm over 5 values that are as small as its eps magnifies what differs between orders of the delta rule:
# transformers and we are each within 0.9e-4 of its logits in float64.
DELTA_TOLERANCE = 1.5e-4
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "num_hidden_layers": 5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 16,
}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
NTK = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 3.0, "factor": 1.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 5.0],
}
# In every file of the hub.
COMMON = {"torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02, "bos_token_id": 1}
