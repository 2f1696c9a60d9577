from typing import Any

from tests.models.families.case import Tiny

HUB: dict[str, dict[str, Any]] = {}
TINY: dict[str, Tiny] = {}
COUNTED: dict[str, dict[str, Any]] = {
    "qwen4_exp_text": {
        "num_hidden_layers": 5,
        "num_experts": 16,
        "eos_token_id": 1,
        # Two layers with tables of different primes.
        "ple_layer_ids": [2, 3],
        "ngram_vocab_size_base": 2000,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }
}
