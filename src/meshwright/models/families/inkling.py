from collections.abc import Mapping
from typing import Any

from meshwright.models.config_tables import Extra
from meshwright.models.families.by_layer import ByLayer, by_layer, matrix, vector
from meshwright.models.families.family import Family, Key, Rule, fixed, ignored, needed, without
from meshwright.models.families.keys import LLAMA_KEYS, PLANNED_POSITIONS, ROUTER

_LOCAL = "hybrid_sliding"


def attention_layers(given: Mapping[str, Any], fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The window, the heads and the distances of relative positions of each layer, in both families."""
    kinds = given.get("layer_types")
    if kinds is None:
        local = given.get("local_layer_ids")
        numbers = range(fields["num_layers"])
        kinds = [_LOCAL if (n in local if local is not None else n % 6 != 5) else "hybrid" for n in numbers]
    window = given.get("sliding_window_size") or 512
    names = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "d_head": "head_dim"}
    of_local = {field: given.get(f"swa_{key}") or fields[field] for field, key in names.items()}
    of_global = {field: fields[field] for field in names}
    layers = []
    for kind in kinds:
        is_local, extent = kind == _LOCAL, given.get("rel_extent") or 1024
        distances = min(extent, window) if is_local else extent
        layers.append(
            (of_local if is_local else of_global)
            | {
                "sliding_window": window if is_local else None,
                "extras": of_distances(given.get("d_rel") or 16, distances),
            }
        )
    return layers


def of_distances(width: int, distances: int) -> tuple[Extra, ...]:
    """Relative positions: a query of `width` for each head, and a vector for each distance."""
    return (
        matrix("distances_of_query", "DNn", "D", n=width),
        vector("distances", "nw", n=width, w=distances),
    )


def short_convolutions(width: int) -> tuple[Extra, ...]:
    """Convolutions along positions of keys, of values, and of both results of a layer."""
    of_keys = tuple(vector(f"conv_of_{part}", "KHv", v=width) for part in ("keys", "values"))
    return of_keys + tuple(vector(f"conv_of_{part}", "Dv", v=width) for part in ("attention", "mlp"))


# Keys of both Inkling families.
INKLING_KEYS: dict[str, Rule] = (
    without(LLAMA_KEYS, "intermediate_size")
    | PLANNED_POSITIONS
    | ROUTER
    | {
        "n_routed_experts": needed("moe.num_experts", "num_experts", "num_local_experts"),
        "num_experts_per_tok": needed("moe.experts_per_token"),
        "moe_intermediate_size": needed(("moe.d_ff", "d_ff")),
        "route_scale": Key("moe.scaling", 8.0),
    }
    | ignored("planned only: factors of logits", "log_scaling_n_floor", "log_scaling_alpha")
    | ignored("of the tokenizer", "unpadded_vocab_size")
    | ignored("how transformers runs it", "number_of_conv_states")
)
ATTENTION_PARTS = {
    "layer_types": ("sliding_window",),
    "local_layer_ids": ("sliding_window",),
    "sliding_window_size": ("sliding_window",),
    "swa_num_attention_heads": ("variants",),
    "swa_num_key_value_heads": ("variants",),
    "swa_head_dim": ("variants",),
    "d_rel": ("extras",),
    "rel_extent": ("extras",),
    "conv_kernel_size": ("extras",),
}


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    kinds = given.get("mlp_layer_types") or ["sparse"] * fields["num_layers"]
    shared = fields["moe"].num_shared_experts
    of_all = short_convolutions(given.get("conv_kernel_size") or 4)
    of_all += (vector("mlp_scale", "q", q=1),)
    of_experts = (matrix("router_shared", "Dk", "D", k=shared),)
    layers = attention_layers(given, fields)
    for layer, kind in zip(layers, kinds, strict=False):
        layer["extras"] += of_all + (of_experts if kind == "sparse" else ())
    feed_forwards = tuple("experts" if kind == "sparse" else "dense" for kind in kinds)
    return {
        "feed_forwards": feed_forwards,
        "d_ff": given.get("intermediate_size") or fields["d_ff"],
    } | by_layer(layers)


FAMILY = Family(
    "inkling",
    "Inkling",
    ("InklingForCausalLM",),
    model_types=("inkling_text",),
    wrappers=("inkling_mm_model",),
    keys=INKLING_KEYS
    | {
        "n_shared_experts": Key("moe.num_shared_experts", 2),
        "logits_mup_width_multiplier": Key("logit_scale"),
    }
    | fixed(shared_expert_sink=True)
    | ignored(
        "of the modules that predict further tokens",
        "num_mtp_layers", "chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids",
    )
    | ignored("planned only: of the router's norm", "rms_norm_eps_moe_gate"),
    sets={
        "qk_norm": True,
        "embedding_norm": True,
        "positions": "none",
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
        "planned_only": "relative positions and convolutions (Inkling)",
    },
    groups=(
        ByLayer(
            _read,
            ATTENTION_PARTS | {"mlp_layer_types": ("feed_forwards",), "intermediate_size": ("d_ff",)},
        ),
    ),
    tensors={},
    is_written=False,
)  # fmt: skip
