from collections.abc import Mapping
from typing import Any

from meshwright.models.config_tables import Extra
from meshwright.models.families.by_layer import ByLayer, by_layer, listed, matrix, vector
from meshwright.models.families.family import Family, Key, ignored, without
from meshwright.models.families.gemma4 import GEMMA_4_KEYS

_PATTERN = 5  # each fifth layer sees all positions, unless a list says otherwise


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers, d_model = fields["num_layers"], fields["d_model"]
    types = given.get("layer_types") or [
        "sliding_attention" if (n + 1) % _PATTERN else "full_attention" for n in range(num_layers)
    ]
    widths = listed(given, "intermediate_size", 16_384, num_layers)
    layers = [
        {
            "sliding_window": given.get("sliding_window") or 512 if kind == "sliding_attention" else None,
            "d_ff": width,
        }
        for kind, width in zip(types, widths, strict=False)
    ]
    width, streams = given.get("hidden_size_per_layer_input", 256), given.get("altup_num_inputs", 4)
    rank, rows = given.get("laurel_rank", 64), given.get("vocab_size_per_layer_input", 262_144)
    extras: list[Extra] = [
        matrix("per_layer_gate", "Dk", "D", k=width),
        matrix("per_layer_out", "kD", "k", k=width),
        vector("per_layer_norm", "D"),
        # The low-rank branch next to attention.
        matrix("low_rank_in", "Dn", "D", n=rank),
        matrix("low_rank_out", "nD", "n", n=rank),
        vector("low_rank_norm", "D"),
        # The streams of the residual; a layer computes a single one.
        matrix("router_streams", "Do", "D", o=streams),
        vector("router_streams_norm", "D"),
        vector("streams_scale", "D"),
        vector("streams_corrected", "oq", o=streams, q=streams),
        vector("streams_predicted", "oqz", o=streams, q=streams, z=streams),
        vector("table_of_layers", "vh", in_layers=False, v=rows, h=num_layers * width),
        matrix("per_layer_in", "Dh", "D", in_layers=False, h=num_layers * width),
        vector("per_layer_in_norm", "k", in_layers=False, k=width),
        vector("streams_in", "Dwm", in_layers=False, w=d_model, m=2 * (streams - 1)),
    ]
    return {"num_kv_shared": given.get("num_kv_shared_layers", 15), "extras": tuple(extras)} | by_layer(
        layers
    )


FAMILY = Family(
    "gemma3n",
    "Gemma 3n (text)",
    ("Gemma3nForCausalLM",),
    model_types=("gemma3n_text",),
    wrappers=("gemma3n",),
    keys=without(GEMMA_4_KEYS, "intermediate_size")
    | {
        "vocab_size": Key("vocab_size", 262_400),
        "max_position_embeddings": Key("max_seq_len", 32_768),
        "final_logit_softcapping": Key("logit_softcap", 30.0),
    }
    | ignored(
        "planned only, and positions change no plan",
        "rope_local_base_freq", "rope_theta", "rope_scaling",
    )
    | ignored(
        "planned only: how streams are mixed, and a share of activations that is set to 0",
        "activation_sparsity_pattern", "altup_active_idx", "altup_coef_clip", "altup_correct_scale",
        "altup_lr_multiplier",
    ),
    sets={
        "d_ff": 16_384,
        "post_norms": True,
        "qk_norm": True,
        "scale_embedding": True,
        "query_scale": 1.0,
        "planned_only": "streams and per-layer embeddings (Gemma 3n)",
    },
    groups=(
        ByLayer(
            _read,
            {
                "layer_types": ("sliding_window",),
                "sliding_window": ("sliding_window",),
                "intermediate_size": ("d_ff",),
                "num_kv_shared_layers": ("num_kv_shared",),
                "hidden_size_per_layer_input": ("extras",),
                "vocab_size_per_layer_input": ("extras",),
                "altup_num_inputs": ("extras",),
                "laurel_rank": ("extras",),
            },
        ),
    ),
    tensors={},
    is_written=False,
)  # fmt: skip
