from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.models.families.by_layer import ByLayer, by_layer
from meshwright.models.families.family import Family, Fixed, Key, Rule, ignored, without
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LLAMA_KEYS, MTP

_PATTERN = 6


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers = fields["num_layers"]
    types = given.get("layer_types")
    if types is None and (pattern := given.get("hybrid_layer_pattern")):
        types = ["sliding_attention" if is_local else "full_attention" for is_local in pattern]
    types = types or [
        "full_attention" if n == 0 or (n + 1) % _PATTERN == 0 else "sliding_attention"
        for n in range(num_layers)
    ]
    kinds = given.get("mlp_layer_types") or [
        "sparse" if has_experts else "dense"
        for has_experts in given.get("moe_layer_freq") or [0] + [1] * (num_layers - 1)
    ]
    num_dense = list(kinds).index("sparse") if "sparse" in kinds else num_layers
    of_local = {int(n): sizes for n, sizes in (given.get("per_layer_config") or {}).items()}
    layers = []
    for number, kind in enumerate(types[:num_layers]):
        is_local, changed = kind == "sliding_attention", of_local.get(number, {})
        kv_heads = given.get("swa_num_key_value_heads") if is_local else None
        kv_heads = kv_heads or changed.get("num_key_value_heads")
        if is_local and not kv_heads:
            kv_heads = 2 * fields["num_kv_heads"]
        heads = (given.get("swa_num_attention_heads") if is_local else None) or fields["num_heads"]
        layers.append(
            {
                "sliding_window": given.get("sliding_window", 129) if is_local else None,
                "attention_sinks": (is_local and given.get("add_swa_attention_sink_bias", True))
                or (not is_local and given.get("add_full_attention_sink_bias", False)),
                "num_heads": heads,
                "num_kv_heads": kv_heads or fields["num_kv_heads"],
                "d_head": (given.get("swa_head_dim") if is_local else None) or fields["d_head"],
                "value_dim": (given.get("swa_v_head_dim") if is_local else None)
                or given.get("v_head_dim")
                or 128,
            }
        )
    feed_forwards = tuple("experts" if kind == "sparse" else "dense" for kind in kinds)
    moe = replace(fields["moe"], num_dense_layers=num_dense)
    return {"moe": moe, "feed_forwards": feed_forwards[:num_layers]} | by_layer(layers)


_KEYS: dict[str, Rule] = without(LLAMA_KEYS | DEEPSEEK_EXPERTS, "moe_layer_freq")

FAMILY = Family(
    "mimo_v2_flash",
    "MiMo-V2-Flash",
    ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    model_types=("mimo_v2_flash", "mimo_v2"),
    keys=_KEYS
    | MTP
    | {
        "rms_norm_eps": Key("norm_eps", 1e-5, also=("layernorm_epsilon",)),
        "max_position_embeddings": Key("max_seq_len", 131_072),
        "head_dim": Key("d_head", 192),
        "attention_bias": Key("qkv_bias", False),
        "norm_topk_prob": Key("moe.normalized", True),
        "scoring_func": Fixed(("sigmoid",)),
        "topk_method": Fixed(("noaux_tc",)),
    }
    | ignored(
        "planned only, and positions change no plan",
        "rope_parameters", "rope_theta", "rope_scaling", "swa_rope_theta", "partial_rotary_factor",
    )
    | ignored("planned only: a factor of the values", "attention_value_scale")
    | ignored("sliding_window counts", "sliding_window_size", "attention_chunk_size"),
    sets={
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
        "planned_only": "local layers with other heads (MiMo-V2)",
    },
    groups=(
        ByLayer(
            _read,
            {
                "layer_types": ("sliding_window",),
                "hybrid_layer_pattern": ("sliding_window",),
                "sliding_window": ("sliding_window",),
                "mlp_layer_types": ("feed_forwards",),
                "moe_layer_freq": ("feed_forwards",),
                "per_layer_config": ("variants",),
                "v_head_dim": ("value_dim",),
                "swa_num_attention_heads": ("variants",),
                "swa_num_key_value_heads": ("variants",),
                "swa_head_dim": ("variants",),
                "swa_v_head_dim": ("variants",),
                "add_swa_attention_sink_bias": ("attention_sinks",),
                "add_full_attention_sink_bias": ("attention_sinks",),
            },
        ),
    ),
    tensors={},
    is_written=False,
)  # fmt: skip
