from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY = {
    "dbrx": Tiny(
        "Dbrx",
        {
            "d_model": 48,
            "n_heads": 8,
            "n_layers": 1,
            "max_seq_len": 64,
            # transformers 5 reads this and not the table.
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 100.0},
            "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 48},
        },
        written="DbrxForCausalLM",
        own_names=True,
    ),
}
