from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config_tables import MLA
from meshwright.models.families.by_layer import ByLayer, by_layer, vector
from meshwright.models.families.deepseek_v32 import FAMILY as V32
from meshwright.models.families.family import Family, Fixed, Key, ignored, without
from meshwright.models.families.glm_moe_dsa import Indexers
from meshwright.models.families.keys import EPS_1E_5
from meshwright.models.families.layers import ExpertLayers


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers, mla = fields["num_layers"], fields["mla"]
    sources = given.get("kv_source_layers")
    if sources is not None and list(sources) != list(range(num_layers)):
        raise ModelError(f"{name}: kv_source_layers must be each layer's own number; others are not read")
    unturned = MLA(mla.kv_rank, mla.nope_dim + mla.rope_dim, 0, mla.value_dim, mla.q_rank)
    interval = given.get("no_rope_layer_interval") or 4
    turned = given.get("no_rope_layers") or [(n + 1) % interval for n in range(num_layers)]
    extras = (
        *(vector(f"index_q_norm_{part}", "D") for part in ("scale", "bias")),
        *(vector(f"index_scaling_{part}", "x") for part in ("scale", "bias")),
        *(vector(f"softmax_scaling_{part}", "N") for part in ("scale", "bias")),
    )
    of_indexers = Indexers().read(given, fields, name)
    if of_indexers["variants"]:
        raise ModelError(f"{name}: indexer_types must be 'full' in every layer; others are not read")
    layers = [{"mla": mla if turned[n] else unturned} for n in range(num_layers)]
    return of_indexers | {"extras": extras} | by_layer(layers)


_NOT_READ = ("moe_layer_freq", "rope_interleave", "first_k_dense_replace", "mlp_layer_types")

FAMILY = Family(
    "mistral_large4",
    "Mistral Large 4",
    ("MistralLarge4ForCausalLM",),
    model_types=("mistral_large4_text",),
    wrappers=("mistral_large4",),
    keys=without(V32.keys, *_NOT_READ)
    | EPS_1E_5
    | {
        "n_shared_experts": Key("moe.num_shared_experts", 1),
        "routed_scaling_factor": Key("moe.scaling", 1.0),
        "final_logit_softcapping": Key("logit_softcap"),
        "indexer_rope_interleave": Fixed((True, False)),
    }
    | ignored(
        "planned only, and positions change no plan",
        "rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "rope_interleave",
    ),
    sets={
        **V32.sets,
        "moe.choice_bias": False,
        "planned_only": "sparse attention with unturned layers (Mistral Large 4)",
    },
    groups=(
        ExpertLayers(dense=1),
        ByLayer(
            _read,
            dict.fromkeys(("kv_source_layers",), ("mla",))
            | dict.fromkeys(("no_rope_layers", "no_rope_layer_interval"), ("mla.rope_dim",))
            | dict.fromkeys(Indexers().parts, ("indexer",)),
        ),
    ),
    tensors={},
    is_written=False,
)  # fmt: skip
