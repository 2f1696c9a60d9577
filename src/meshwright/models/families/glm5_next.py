from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.families.by_layer import ByLayer, by_layer, hyper_connections, matrix, vector
from meshwright.models.families.deepseek_v32 import FAMILY as V32
from meshwright.models.families.family import Family, Key, ignored, without
from meshwright.models.families.keys import EPS_1E_5, PLANNED_POSITIONS
from meshwright.models.families.layers import ExpertLayers
from meshwright.models.mixers import GatedDelta

_KINDS = {"linear_attention": "state", "indexed_attention": "attention", "full_attention": "attention"}


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers, table = fields["num_layers"], given.get("linear_attn_config") or {}
    kinds = given.get("layer_types") or [
        "indexed_attention" if n % 4 == 3 else "linear_attention" for n in range(num_layers)
    ]
    if unknown := {*kinds} - {*_KINDS}:
        raise ModelError(f"{name}: layer_types has {min(unknown)!r}; fits: {', '.join(_KINDS)}")
    if "shared" in (given.get("indexer_types") or ()):
        raise ModelError(f"{name}: indexer_types must be 'full' in every layer; others are not read")
    heads = table.get("num_heads", given.get("linear_num_heads", 64))
    size = table.get("head_dim", given.get("linear_head_dim", 128))
    width = table.get("short_conv_kernel_size", given.get("linear_conv_kernel_dim", 4))
    streams, pooled = given.get("hc_mult", 4), given.get("index_kpool", 16)
    of_streams = hyper_connections(streams, 2 * streams + streams**2, 3)
    of_attention = (vector("index_positions", "wy", w=pooled), matrix("index_gate", "Dy", "D"))
    layers = [
        {"extras": of_streams + (of_attention if _KINDS[kind] == "attention" else ())} for kind in kinds
    ]
    return by_layer(layers) | {
        "delta": GatedDelta(heads, heads, size, size, width, rank=size),
        "mixers": tuple(_KINDS[kind] for kind in kinds),
    }


_NOT_READ = ("moe_layer_freq", "rope_interleave", "first_k_dense_replace", "layer_types", "mlp_layer_types")

FAMILY = Family(
    "glm5_next",
    "GLM-5 Next",
    ("Glm5NextForCausalLM",),
    model_types=("glm5_next_text",),
    wrappers=("glm5_next",),
    keys=without(V32.keys, *_NOT_READ)
    | EPS_1E_5
    | PLANNED_POSITIONS
    | {"n_shared_experts": Key("moe.num_shared_experts", 1)}
    | ignored(
        "planned only: functions of streams, decays and activation",
        "hc_eps", "hc_sinkhorn_iters", "swiglu_limit", "linear_lower_bound", "index_kpool_always_select_tail",
    )
    | ignored("of the chosen keys", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"),
    sets={**V32.sets, "planned_only": "hyper-connections and an indexer of pooled keys (GLM-5 Next)"},
    optional=("delta",),
    groups=(
        ExpertLayers(dense=3),
        ByLayer(
            _read,
            {
                "layer_types": ("mixers",),
                "indexer_types": ("indexer",),
                "linear_attn_config": ("delta",),
                "linear_num_heads": ("delta.num_value_heads",),
                "linear_head_dim": ("delta.key_dim",),
                "linear_conv_kernel_dim": ("delta.conv_width",),
                "hc_mult": ("extras",),
                "index_kpool": ("extras",),
            },
        ),
    ),
    tensors={},
    is_written=False,
)  # fmt: skip
