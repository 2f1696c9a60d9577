from typing import Any

from tests.models.families.case import PLAIN, SHAPE, Tiny

HUB: dict[str, dict[str, Any]] = {}
_TEXT = SHAPE | {
    "head_dim": 8,
    "dense_intermediate_size": 40,
    "intermediate_size": 24,
    "shared_intermediate_size": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    # Of 48 positions 12 blocks; a query reads its own and two others.
    "index_n_heads": 4,
    "index_head_dim": 12,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SEES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY = {
    # As the hub has it: only the model that sees has the names of its files.
    "minimax_m3": Tiny(
        "MiniMaxM3VL",
        {"text_config": _TEXT, "vision_config": _SEES | {"image_size": 28}},
        model="MiniMaxM3SparseForConditionalGeneration",
        split="nightly",
    ),
}
