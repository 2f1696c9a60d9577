from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, by_layer
from meshwright.models.families.family import Family, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, PLANNED_POSITIONS
from meshwright.models.mixers import GatedDelta


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers, heads = fields["num_layers"], fields["num_heads"]
    kinds = given.get("layer_types") or [
        "full_attention" if n % 4 == 3 else "linear_attention" for n in range(num_layers)
    ]
    attends = [kind != "linear_attention" for kind in kinds]
    key_heads = given.get("linear_num_key_heads") or heads
    key_dim = given.get("linear_key_head_dim") or int(0.75 * fields["d_model"] / key_heads)
    delta = GatedDelta(
        key_heads,
        given.get("linear_num_value_heads") or heads,
        key_dim,
        given.get("linear_value_head_dim") or 2 * key_dim,
        given.get("linear_conv_kernel_dim") or 4,
    )
    # Norms follow attention and its feed-forward, and precede the others.
    layers = [{"pre_norms": not one, "post_norms": one} for one in attends]
    return by_layer(layers) | {
        "delta": delta,
        "mixers": tuple("attention" if one else "state" for one in attends),
    }


FAMILY = Family(
    "olmo_hybrid",
    "OLMo Hybrid",
    ("OlmoHybridForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | PLANNED_POSITIONS
    | ignored(
        "how weights start",
        "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor",
    )
    | ignored("planned only: of the delta rule", "linear_allow_neg_eigval"),
    sets={"qk_norm": True, "qk_norm_over": "width", "planned_only": "norms by kind of layer (OLMo Hybrid)"},
    optional=("delta",),
    groups=(
        ByLayer(
            _read,
            {
                "layer_types": ("mixers",),
                "linear_num_key_heads": ("delta.num_key_heads",),
                "linear_num_value_heads": ("delta.num_value_heads",),
                "linear_key_head_dim": ("delta.key_dim",),
                "linear_value_head_dim": ("delta.value_dim",),
                "linear_conv_kernel_dim": ("delta.conv_width",),
            },
        ),
    ),
    tensors={},
    is_written=False,
)  # fmt: skip
