from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.models.config_tables import MLA
from meshwright.models.families.by_layer import ByLayer, by_layer, matrix, vector
from meshwright.models.families.deepseek_v32 import FAMILY as V32
from meshwright.models.families.family import Family, Key, ignored, without
from meshwright.models.families.keys import EPS_1E_5, PLANNED_POSITIONS
from meshwright.models.families.layers import ExpertLayers

# Names of a local layer's sizes, and their values if a file has neither them nor `per_layer_config`.
_LOCAL = {
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers, mla = fields["num_layers"], fields["mla"]
    kinds = given.get("layer_types") or [
        "indexed_attention" if n < 2 or n % 4 == 1 else "sliding_attention" for n in range(num_layers)
    ]
    changed = {int(n): sizes for n, sizes in (given.get("per_layer_config") or {}).items()}
    layers = []
    for number, kind in enumerate(kinds):
        if kind != "sliding_attention":
            of_layer = {"num_heads": fields["num_heads"], "mla": mla, "indexer": fields["indexer"]}
        else:
            sizes = {key: given.get(f"swa_{key}", value) for key, value in _LOCAL.items()}
            sizes |= changed.get(number, {})
            local = MLA(
                sizes["kv_lora_rank"],
                sizes["qk_nope_head_dim"],
                sizes["qk_rope_head_dim"],
                sizes["v_head_dim"],
                sizes["q_lora_rank"],
            )
            of_layer = {"num_heads": sizes["num_attention_heads"], "mla": local, "indexer": None}
        window = given.get("sliding_window") or given.get("sliding_window_size") or 512
        of_layer |= {
            "num_kv_heads": of_layer["num_heads"],
            "d_head": of_layer["mla"].nope_dim + of_layer["mla"].rope_dim,
            "sliding_window": window if kind == "sliding_attention" else None,
        }
        layers.append(of_layer)
    moe = replace(fields["moe"], d_ff_shared=given.get("shared_experts_intermediate_size"))
    extras = (vector("rope_norm", "A"), matrix("head_gates", "DN", "D"))
    return {"moe": moe, "extras": extras} | by_layer(layers)


_NOT_READ = ("moe_layer_freq", "first_k_dense_replace", "layer_types", "mlp_layer_types", "rope_interleave")

FAMILY = Family(
    "dots3_note",
    "dots.note",
    ("Dots3NoteForCausalLM",),
    model_types=("dots3_note_text",),
    wrappers=("dots3_note",),
    keys=without(V32.keys, *_NOT_READ)
    | EPS_1E_5
    | PLANNED_POSITIONS
    | {"n_shared_experts": Key("moe.num_shared_experts", 1)}
    | ignored("as layer_types says", "use_dsa", "use_sliding_window"),
    sets={**V32.sets, "planned_only": "sparse and local latent attention (dots.note)"},
    groups=(
        ExpertLayers(dense=1),
        ByLayer(
            _read,
            {
                "layer_types": ("sliding_window",),
                "sliding_window": ("sliding_window",),
                "sliding_window_size": ("sliding_window",),
                "per_layer_config": ("variants",),
                "shared_experts_intermediate_size": ("moe.d_ff_shared",),
            }
            | {f"swa_{key}": ("variants",) for key in _LOCAL},
        ),
    ),
    tensors={},
    is_written=False,
)
