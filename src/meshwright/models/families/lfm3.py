from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, by_layer, matrix
from meshwright.models.families.family import Family, Key, fixed
from meshwright.models.families.keys import ACTIVATION, PLANNED_POSITIONS
from meshwright.models.families.lfm2 import LFM2_KEYS


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    kinds = given.get("layer_types") or [
        "full_attention" if n % 4 == 2 else "sliding_attention" if n % 4 == 0 and n else "conv"
        for n in range(fields["num_layers"])
    ]
    gates = (matrix("head_gates", "DN", "D"),) if given.get("use_attention_gate", True) else ()
    layers = [
        {
            "extras": () if kind == "conv" else gates,
            "sliding_window": given.get("sliding_window", 256) if kind == "sliding_attention" else None,
        }
        for kind in kinds
    ]
    return by_layer(layers) | {"mixers": tuple("state" if kind == "conv" else "attention" for kind in kinds)}


FAMILY = Family(
    "lfm3",
    "LFM3",
    ("Lfm3ForCausalLM",),
    wrappers=("lfm3_vl",),
    keys=LFM2_KEYS
    | PLANNED_POSITIONS
    | {
        "use_sandwich_norm": Key("post_norms", True),
        "conv_L_cache": Key("short_convolution.width", 7),
        "hidden_act": Key("activation", "silu", form=ACTIVATION),
    }
    | fixed(attention_bias=False),
    sets={"qk_norm": True, "planned_only": "a gate for each head (LFM3)"},
    groups=(
        ByLayer(
            _read,
            {
                "layer_types": ("mixers",),
                "sliding_window": ("sliding_window",),
                "use_attention_gate": ("extras",),
            },
        ),
    ),
    tensors={},
    is_written=False,
)
