from typing import Any

from tests.models.families.case import YARN, Tiny

HUB: dict[str, dict[str, Any]] = {}
_KINDS = ("sliding", "heavily_compressed", "compressed_sparse", "heavily_compressed", "compressed_sparse")
# Of 48 positions 24 entries of 2, of which a query reads 5, and 12 of 4. Two layers have experts by a table.
TINY: dict[str, Tiny] = {
    "deepseek_v4": Tiny(
        "DeepseekV4",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "qk_rope_head_dim": 4,
            "q_lora_rank": 24,
            "o_groups": 4,
            "o_lora_rank": 6,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "num_hidden_layers": 5,
            "layer_types": [f"{kind}_attention" for kind in _KINDS],
            "compress_rates": {
                "compressed_sparse_attention": 2,
                "heavily_compressed_attention": 4,
            },
            "index_n_heads": 12,
            "index_head_dim": 8,
            "index_topk": 5,
            "num_hash_layers": 2,
            "rope_theta": 100.0,
            "compress_rope_theta": 100.0,
            "rope_scaling": YARN,
        },
        split="nightly",
    ),
}
COUNTED: dict[str, dict[str, Any]] = {"deepseek_v4": {"num_hidden_layers": 7, "n_routed_experts": 16}}
