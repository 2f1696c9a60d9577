from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.models.config_tables import Extra, MoE
from meshwright.models.families.by_layer import ByLayer, by_layer, matrix, vector
from meshwright.models.families.family import Family, Key, Rule, ignored, without
from meshwright.models.families.keys import ACTIVATION, SIZES

_PATTERN = 6  # each sixth layer sees all positions, unless a list says otherwise


def read_layers(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Windows, heads and widths of the layers, the keys that they share, and their further weights."""
    num_layers = fields["num_layers"]
    types = given.get("layer_types") or [
        "sliding_attention" if (n + 1) % _PATTERN else "full_attention" for n in range(num_layers)
    ]
    types = [*types[: num_layers - 1], "full_attention"]
    num_shared = given.get("num_kv_shared_layers") or 0
    keys_are_values = bool(given.get("attention_k_eq_v"))
    global_kv_heads = (given.get("num_global_key_value_heads") if keys_are_values else None) or fields[
        "num_kv_heads"
    ]
    of_layers = {int(n): sizes for n, sizes in (given.get("per_layer_config") or {}).items()}
    moe = None
    if given.get("enable_moe_block"):
        of_experts: list[Any] = [
            given.get(key) for key in ("num_experts", "top_k_experts", "moe_intermediate_size")
        ]
        moe = MoE(*of_experts, num_shared_experts=1)
    layers = []
    for number, kind in enumerate(types):
        sees_all, shares = kind == "full_attention", number >= num_layers - num_shared
        sizes = {"head_dim": given.get("global_head_dim") or 512, "num_key_value_heads": global_kv_heads}
        sizes = {} if not sees_all else of_layers.get(number, {}) if of_layers else sizes
        is_wide = bool(given.get("use_double_wide_mlp")) and shares
        d_ff = fields["d_ff"] * (2 if is_wide else 1)
        layers.append(
            {
                "d_ff": d_ff,
                "moe": moe and replace(moe, d_ff_shared=d_ff),
                "sliding_window": None if sees_all else given.get("sliding_window") or 512,
                "d_head": sizes.get("head_dim", fields["d_head"]),
                "num_kv_heads": sizes.get("num_key_value_heads", fields["num_kv_heads"]),
                "values_are_keys": keys_are_values and sees_all,
            }
        )
    extras: list[Extra] = []
    if given.get("enable_moe_block"):
        extras += [vector("router_scale", "D"), vector("router_expert_scale", "E")]
        extras += [vector(f"mlp_norm_{part}", "D") for part in ("shared", "experts", "experts_post")]
    if width := given.get("hidden_size_per_layer_input"):
        rows = given.get("vocab_size_per_layer_input") or 262_144
        extras += [matrix("per_layer_gate", "Dk", "D", k=width), matrix("per_layer_out", "kD", "k", k=width)]
        extras += [vector("per_layer_norm", "D")]
        extras += [
            vector("table_of_layers", "vh", in_layers=False, v=rows, h=num_layers * width),
            matrix("per_layer_in", "Dh", "D", in_layers=False, h=num_layers * width),
            vector("per_layer_in_norm", "k", in_layers=False, k=width),
        ]
    return {"num_kv_shared": num_shared, "extras": tuple(extras)} | by_layer(layers)


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return read_layers({"hidden_size_per_layer_input": 256, **given}, fields, name)


GEMMA_4_KEYS: dict[str, Rule] = without(SIZES, "hidden_act") | {
    "head_dim": Key("d_head", 256),
    "max_position_embeddings": Key("max_seq_len", 131_072),
    "vocab_size": Key("vocab_size", 262_144),
    "tie_word_embeddings": Key("tied_embeddings", True),
    "hidden_activation": Key("activation", "gelu_pytorch_tanh", also=("hidden_act",), form=ACTIVATION),
    "final_logit_softcapping": Key("logit_softcap"),
    "attention_bias": Key(("qkv_bias", "attention_out_bias"), False),
    **ignored("planned only, and positions change no plan", "rope_parameters"),
    **ignored("of tokens that are not text", "use_bidirectional_attention"),
}
GEMMA_4_SETS: dict[str, Any] = {
    "post_norms": True,
    "qk_norm": True,
    "scale_embedding": True,
    "query_scale": 1.0,
    "planned_only": "layers with heads of two sizes (Gemma 4)",
}
LAYER_KEYS = {
    "layer_types": ("sliding_window",),
    "sliding_window": ("sliding_window",),
    "per_layer_config": ("variants",),
    "global_head_dim": ("variants",),
    "num_global_key_value_heads": ("variants",),
    "attention_k_eq_v": ("values_are_keys",),
    "use_double_wide_mlp": ("variants",),
    "num_kv_shared_layers": ("num_kv_shared",),
    "enable_moe_block": ("moe",),
    "num_experts": ("moe.num_experts",),
    "top_k_experts": ("moe.experts_per_token",),
    "moe_intermediate_size": ("moe.d_ff",),
    "hidden_size_per_layer_input": ("extras",),
    "vocab_size_per_layer_input": ("extras",),
}


FAMILY = Family(
    "gemma4",
    "Gemma 4 (text)",
    ("Gemma4ForCausalLM",),
    model_types=("gemma4_text",),
    wrappers=("gemma4",),
    keys=GEMMA_4_KEYS,
    sets=GEMMA_4_SETS,
    groups=(ByLayer(_read, LAYER_KEYS),),
    tensors={},
    is_written=False,
)
