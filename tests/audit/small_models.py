"""Models of few layers whose sizes are still usual: compilers pad small arrays to their tiles."""

from meshwright.models.config import ModelConfig
from meshwright.models.hf import from_hf


def deepseek_v4(scale: int = 1) -> ModelConfig:
    """A layer of each kind: of a window only, with entries of 128 positions, and with chosen ones of 4.

    scale: of its widths and numbers of heads and experts.
    """
    values = {
        "model_type": "deepseek_v4",
        "vocab_size": 16384 * scale,
        "hidden_size": 1024 * scale,
        "num_hidden_layers": 3,
        "num_attention_heads": 16 * scale,
        "num_key_value_heads": 1,
        "head_dim": 128 * scale,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 256 * scale,
        "o_lora_rank": 256 * scale,
        "o_groups": 4 * scale,
        "moe_intermediate_size": 512 * scale,
        "n_routed_experts": 8 * scale,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "index_topk": 256 * scale,
        "index_n_heads": 16 * scale,
        "index_head_dim": 128,
        "sliding_window": 128,
        "num_hash_layers": 1,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": False,
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    }
    return from_hf(values, "deepseek-v4-small")
