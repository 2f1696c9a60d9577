from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, hyper_connections, joined_streams, vector
from meshwright.models.families.family import Family, Key, ignored, without
from meshwright.models.families.glm_moe_dsa import FAMILY as GLM
from meshwright.models.families.glm_moe_dsa import Indexers
from meshwright.models.families.keys import PLANNED_POSITIONS
from meshwright.models.families.layers import ExpertLayers


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    streams = given.get("hc_mult", 4)
    extras = (*hyper_connections(streams, 2 * streams, 2), vector("sinks_of_latent", "N"))
    return {"extras": extras + joined_streams(streams)}


_NOT_READ = ("first_k_dense_replace", "moe_layer_freq", "rope_interleave", "indexer_rope_interleave")

FAMILY = Family(
    "hy_v4",
    "Hunyuan 4",
    ("HYV4ForCausalLM",),
    keys=without(GLM.keys, *_NOT_READ, "mlp_layer_types")
    | PLANNED_POSITIONS
    | {
        "n_shared_experts": Key("moe.num_shared_experts", 1),
        "routed_scaling_factor": Key("moe.scaling", 2.827),
    }
    | ignored(
        "planned only: functions of streams, sinks and activation",
        "hc_magnitude", "hc_eps", "learnable_sink_init", "swiglu_limit",
    ),
    sets={**GLM.sets, "attention_gate": True, "planned_only": "hyper-connections (Hunyuan 4)"},
    groups=(ExpertLayers(dense=1), ByLayer(_read, {"hc_mult": ("extras",)}), Indexers(every=4, offset=2)),
    tensors={},
    is_written=False,
)  # fmt: skip
