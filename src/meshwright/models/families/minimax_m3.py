from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import Indexer
from meshwright.models.families.by_layer import ByLayer, by_layer
from meshwright.models.families.family import Family, Fixed, Key, Rule, ignored, needed
from meshwright.models.families.keys import LLAMA_KEYS, MTP
from meshwright.models.families.releases import published, release

# Names of the indexer's sizes in transformers, and in the table of older files.
_INDEX = {
    "index_n_heads": ("sparse_num_index_heads", 4),
    "index_head_dim": ("sparse_index_dim", 128),
    "index_block_size": ("sparse_block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", 16),
}


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers, table = fields["num_layers"], given.get("sparse_attention_config") or {}
    if not isinstance(table, Mapping):
        raise ModelError(f"{name}: sparse_attention_config = {table!r} must be a dict")
    heads, width, block, num_blocks = (
        table.get(older, given.get(key, default)) for key, (older, default) in _INDEX.items()
    )
    indexer = Indexer(heads, width, block * num_blocks, weighted=False, normed="both")
    kinds = given.get("layer_types")
    if kinds is None and table.get("use_sparse_attention", True):
        kinds = ["sparse" if is_sparse else "full" for is_sparse in table.get("sparse_attention_freq") or ()]
    kinds = kinds or ["full"] * num_layers
    mlps = given.get("mlp_layer_types") or [
        "sparse" if has_experts else "dense"
        for has_experts in given.get("moe_layer_freq") or [1] * num_layers
    ]
    feed_forwards = tuple("experts" if kind == "sparse" else "dense" for kind in mlps)[:num_layers]
    layers = [{"indexer": indexer if "sparse" in kind else None} for kind in kinds[:num_layers]]
    return {"feed_forwards": feed_forwards} | by_layer(layers)


_KEYS: dict[str, Rule] = {
    key: rule for key, rule in LLAMA_KEYS.items() if key not in ("hidden_act", "intermediate_size")
}

FAMILY = Family(
    "minimax_m3",
    "MiniMax-M3",
    ("MiniMaxM3ForCausalLM", "MiniMaxM3VLForCausalLM"),
    model_types=("minimax_m3", "minimax_m3_vl_text"),
    wrappers=("minimax_m3_vl",),
    keys=_KEYS
    | MTP
    | {
        "dense_intermediate_size": Key("d_ff", 12_288),
        "intermediate_size": needed("moe.d_ff", "moe_intermediate_size"),
        "shared_intermediate_size": Key("moe.d_ff_shared", 3072),
        "n_shared_experts": Key("moe.num_shared_experts", 1),
        "num_local_experts": needed("moe.num_experts", "num_experts"),
        "num_experts_per_tok": needed("moe.experts_per_token"),
        "routed_scaling_factor": Key("moe.scaling", 2.0),
        "attention_output_gate": Key("attention_gate", False),
        "use_qk_norm": Fixed((True,)),
        "qk_norm_type": Fixed(("per_head",)),
        "use_routing_bias": Fixed((True,)),
        "scoring_func": Fixed(("sigmoid",)),
    }
    | ignored(
        "planned only, and positions change no plan",
        "rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "partial_rotary_factor",
    )
    | ignored("planned only: its activation", "hidden_act", "swiglu_alpha", "swiglu_limit")
    | ignored("planned only: norms multiply by 1 + scale", "use_gemma_norm")
    | ignored("as its lists of layers say", "first_k_dense_replace", "moe_intermediate_size")
    | ignored("num_nextn_predict_layers counts", "num_mtp_modules")
    | ignored(
        "training only", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"
    )
    | ignored("of the chosen blocks", "index_local_blocks"),
    sets={
        "qk_norm": True,
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
        "planned_only": "sparse attention by blocks (MiniMax-M3)",
    },
    groups=(
        ByLayer(
            _read,
            {
                "layer_types": ("indexer",),
                "sparse_attention_config": ("indexer",),
                "mlp_layer_types": ("feed_forwards",),
                "moe_layer_freq": ("feed_forwards",),
                "index_n_heads": ("indexer.num_heads",),
                "index_head_dim": ("indexer.head_dim",),
                "index_block_size": ("indexer.top_k",),
                "index_topk_blocks": ("indexer.top_k",),
            },
        ),
    ),
    tensors={},
    is_written=False,
    releases=release(
        "config.json of MiniMaxAI/MiniMax-M3, its language model",
        {
            "minimax-m3": published(
                "L=60, D=6144, F=3072, N=64, K=4, H=128, V=200_064", "426B", dense_intermediate_size=12_288,
                shared_intermediate_size=3072, max_position_embeddings=1_048_576, num_local_experts=128,
                num_experts_per_tok=4, moe_layer_freq=[0] * 3 + [1] * 57,
                sparse_attention_config={"sparse_attention_freq": [0] * 3 + [1] * 57},
            )
        },
    ),
)  # fmt: skip
