from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, vector
from meshwright.models.families.family import Family, Key, ignored, needed
from meshwright.models.families.keys import ROUTER
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.muse_glimmer import MUSE_KEYS


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    kinds = given.get("mlp_layer_types") or ["sparse"] * fields["num_layers"]
    return {
        "feed_forwards": tuple("experts" if kind == "sparse" else "dense" for kind in kinds),
        # A norm of the latent that experts read, and the gates of both sums of a layer; the norm of
        # attention's result has no weights.
        "extras": (vector("latent_in_norm", "m"), vector("attention_sum", "D"), vector("mlp_sum", "D")),
    }


FAMILY = Family(
    "muse_spark",
    "Muse Spark",
    ("MuseSparkForCausalLM",),
    model_types=("muse_spark_text",),
    wrappers=("muse_spark",),
    keys=MUSE_KEYS
    | ROUTER
    | {
        "num_local_experts": needed("moe.num_experts", "num_experts"),
        "num_experts_per_tok": Key("moe.experts_per_token", 8),
        "moe_intermediate_size": needed("moe.d_ff"),
        "moe_hidden_size": Key("moe.latent", 4096),
        "routed_scaling_factor": Key("moe.scaling", 1.0),
    }
    | ignored("planned only: of the gates of sums", "residual_gate_temperature"),
    sets={
        "attention_gate": True,
        "moe.latent_norm": True,
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
        "moe.post_norm": True,
        "planned_only": "gated residuals (Muse Spark)",
    },
    groups=(
        LocalLayers(window=2048, global_every=4),
        ByLayer(_read, {"mlp_layer_types": ("feed_forwards",)}),
    ),
    tensors={},
    is_written=False,
)
