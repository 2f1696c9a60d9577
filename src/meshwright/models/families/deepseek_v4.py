from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.models.config import Indexer
from meshwright.models.families.by_layer import (
    ByLayer,
    by_layer,
    hyper_connections,
    joined_streams,
    matrix,
    vector,
)
from meshwright.models.families.family import Family, Fixed, Key, Rule, ignored, needed, without
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LLAMA_KEYS, MTP

_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _rates(given: Mapping[str, Any], num_layers: int) -> list[int]:
    """For each layer, the positions of one compressed entry; 0 for a layer with only its window."""
    if ratios := given.get("compress_ratios"):
        return list(ratios)[:num_layers]
    known = _RATES | {
        kind: rate
        for kind, rate in (
            *(given.get("compress_rates") or {}).items(),
            ("compressed_sparse_attention", given.get("compress_rate_csa")),
            ("heavily_compressed_attention", given.get("compress_rate_hca")),
        )
        if rate
    }
    kinds = given.get("layer_types") or [
        "heavily_compressed_attention" if n < 2 or n % 2 else "compressed_sparse_attention"
        for n in range(num_layers)
    ]
    return [known.get(kind, 0) for kind in kinds][:num_layers]


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers, width, moe = fields["num_layers"], fields["d_head"], fields["moe"]
    num_hashed = given.get("num_hash_layers", 3)
    kinds = given.get("mlp_layer_types") or [
        "hash_moe" if n < num_hashed else "moe" for n in range(num_layers)
    ]
    index_width, streams = given.get("index_head_dim", 128), given.get("hc_mult", 4)
    indexer = Indexer(given.get("index_n_heads", 64), index_width, given.get("index_topk", 512), normed="rms")
    shared = hyper_connections(streams, 2 * streams + streams**2, 3)
    # The latent is both key and value, and has a norm.
    shared += (vector("kv_latent_norm", "H"),)
    least, most = min(_RATES.values()), max(_RATES.values())
    layers = []
    for rate, kind in zip(_rates(given, num_layers), kinds, strict=False):
        extras, is_sparse = shared, bool(rate) and rate < (least + most) // 2
        if rate:
            of_entry = 2 * width if is_sparse else width
            extras += (
                vector("compressor_positions", "wh", w=rate, h=of_entry),
                matrix("compressor_kv", "Dh", "D", h=of_entry),
                matrix("compressor_gate", "Dh", "D", h=of_entry),
                vector("compressor_norm", "H"),
            )
        if is_sparse:
            # Keys of two overlapping windows, and their gates.
            extras += (
                vector("index_positions", "wn", w=rate, n=2 * index_width),
                matrix("index_kv_more", "Dy", "D"),
                matrix("index_gate", "Dn", "D", n=2 * index_width),
            )
        layers.append(
            {
                "compressed": rate or None,
                "compressed_top_k": indexer.top_k if is_sparse else None,
                "indexer": indexer if is_sparse else None,
                "moe": replace(moe, choice_bias=kind != "hash_moe"),
                "extras": extras,
            }
        )
    read = by_layer(layers)
    return read | {"extras": read["extras"] + joined_streams(streams)}


_KEYS: dict[str, Rule] = without(
    LLAMA_KEYS | DEEPSEEK_EXPERTS,
    "intermediate_size",
    "first_k_dense_replace",
    "moe_layer_freq",
    "n_group",
    "topk_group",
)

FAMILY = Family(
    "deepseek_v4",
    "DeepSeek-V4",
    ("DeepseekV4ForCausalLM",),
    keys=_KEYS
    | MTP
    | {
        "moe_intermediate_size": needed(("moe.d_ff", "d_ff")),
        "q_lora_rank": needed("q_rank"),
        "o_lora_rank": Key("out_rank", 1024),
        "o_groups": Key("out_groups", 8),
        "sliding_window": Key("sliding_window", 128),
        "n_shared_experts": Key("moe.num_shared_experts", 1),
        "norm_topk_prob": Key("moe.normalized", True),
        "attention_bias": Fixed((False,)),
        "mlp_bias": Fixed((False,)),
    }
    | ignored(
        "planned only, and positions change no plan",
        "rope_parameters", "rope_theta", "rope_scaling", "compress_rope_theta", "qk_rope_head_dim",
        "partial_rotary_factor",
    )
    | ignored(
        "planned only: functions of logits and of streams",
        "scoring_func", "topk_method", "hc_eps", "hc_sinkhorn_iters", "swiglu_limit", "intermediate_size",
        "num_local_experts",
    )
    | ignored("how weights are stored", "expert_dtype"),
    sets={
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
        "attention_sinks": True,
        "values_are_keys": True,
        "values_are_cached_keys": True,
        "planned_only": "compressed attention (DeepSeek-V4)",
    },
    groups=(
        ByLayer(
            _read,
            {
                "layer_types": ("compressed",),
                "compress_ratios": ("compressed",),
                "compress_rates": ("compressed",),
                "compress_rate_csa": ("compressed",),
                "compress_rate_hca": ("compressed",),
                "mlp_layer_types": ("moe.choice_bias",),
                "num_hash_layers": ("moe.choice_bias",),
                "index_n_heads": ("indexer.num_heads",),
                "index_head_dim": ("indexer.head_dim",),
                "index_topk": ("indexer.top_k", "compressed_top_k"),
                "hc_mult": ("extras",),
            },
        ),
    ),
    tensors={},
    is_written=False,
)  # fmt: skip
