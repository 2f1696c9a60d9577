from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.families.by_layer import ByLayer, by_layer, matrix, vector
from meshwright.models.families.family import Family, Key, fixed, needed, without
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS, NUM_EXPERTS, PLANNED_POSITIONS

_LOCAL, _GLOBAL = "hybrid_sliding", "hybrid"


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    kinds = given.get("layer_types") or [_GLOBAL] * fields["num_layers"]
    if unknown := {*kinds} - {_LOCAL, _GLOBAL}:
        raise ModelError(f"{name}: layer_types has {min(unknown)!r}; fits: {_GLOBAL!r} and {_LOCAL!r}")
    width, num_experts = given.get("router_hidden_size", 256), fields["moe"].num_experts
    heads = fields["num_heads"] + fields["num_kv_heads"]
    taps = {"y": given.get("cca_time0", 2), "z": given.get("cca_time1", 2)}
    of_router = (
        # Its other columns, one for each expert, are counted as the usual parameter `router`.
        matrix("router_down", "Dk", "D", k=width - num_experts),
        vector("router_down_bias", "l", l=width),
        vector("router_norm", "l", l=width),
        *(matrix(f"router_{part}", "lw", "l", l=width, w=width) for part in ("first", "second")),
        *(vector(f"router_{part}_bias", "w", w=width) for part in ("first", "second")),
        # One column more than experts: the choice of no expert.
        matrix("router_out", "lx", "l", l=width, x=num_experts + 1),
    )
    of_all = (
        *of_router,
        vector("conv_by_channel", "nHy", n=heads, y=taps["y"]),
        matrix("conv_by_head", "Hnvz", "Hz", n=heads, v=fields["d_head"], z=taps["z"]),
        *(vector(f"conv_{part}_bias", "nH", n=heads) for part in ("by_channel", "by_head")),
        vector("temperature_norm", "K"),
        *(
            vector(f"{part}_{which}", "D")
            for part in ("attention", "mlp")
            for which in ("scale", "bias", "residual_scale", "residual_bias")
        ),
    )
    layers = [
        {
            "sliding_window": given.get("sliding_window") if kind == _LOCAL else None,
            "extras": of_all + ((vector("router_states_norm", "l", l=width),) if number else ()),
        }
        for number, kind in enumerate(kinds)
    ]
    read = by_layer(layers)
    of_input = tuple(vector(f"input_{part}", "D", in_layers=False) for part in ("scale", "bias"))
    return read | {"extras": read["extras"] + of_input}


FAMILY = Family(
    "zaya",
    "ZAYA1",
    ("ZayaForCausalLM",),
    keys=without(LLAMA_KEYS, "intermediate_size")
    | NUM_EXPERTS
    | EPS_1E_5
    | PLANNED_POSITIONS
    | fixed(attention_bias=False)
    | {
        "tie_word_embeddings": Key("tied_embeddings", True),
        "moe_intermediate_size": needed(("moe.d_ff", "d_ff")),
        "lm_head_bias": Key("head_bias", False),
    },
    sets={"planned_only": "convolved queries and keys, and a router of several layers (ZAYA1)"},
    groups=(
        ByLayer(
            _read,
            {
                "layer_types": ("sliding_window",),
                "sliding_window": ("sliding_window",),
                "router_hidden_size": ("extras",),
                "cca_time0": ("extras",),
                "cca_time1": ("extras",),
            },
        ),
    ),
    tensors={},
    is_written=False,
)
