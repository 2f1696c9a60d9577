from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {
    "dbrx": {
        "architectures": ["DbrxForCausalLM"],
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
        "d_model": 6144,
        "emb_pdrop": 0.0,
        "ffn_config": {
            "ffn_hidden_size": 10752,
            "model_type": "",
            "moe_jitter_eps": 0.01,
            "moe_loss_weight": 0.05,
            "moe_num_experts": 16,
            "moe_top_k": 4,
        },
        "max_seq_len": 32768,
        "model_type": "dbrx",
        "n_heads": 48,
        "n_layers": 40,
        "output_router_logits": False,
        "resid_pdrop": 0.0,
        "router_aux_loss_coef": 0.05,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
}
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
