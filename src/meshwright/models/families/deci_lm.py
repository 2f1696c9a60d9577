from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config_tables import Extra
from meshwright.models.families.by_layer import ByLayer, by_layer, matrix
from meshwright.models.families.family import Family, Key, ignored, without
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS

_MULTIPLE = 256  # widths of feed-forwards are multiples of it


def _width(block: Mapping[str, Any], d_model: int) -> int:
    """The width of a feed-forward: as stated, or two thirds of a multiple of D, rounded up."""
    if stated := block.get("intermediate_size"):
        return stated
    width = int(2 * block["ffn_mult"] * d_model / 3)
    return -(-width // _MULTIPLE) * _MULTIPLE


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    blocks: Sequence[Mapping[str, Any]] = given.get("block_configs") or ()
    if len(blocks) != fields["num_layers"]:
        raise ModelError(
            f"{name}: block_configs has {len(blocks)} blocks for num_hidden_layers = {fields['num_layers']}"
        )
    layers, mixers, feed_forwards = [], [], []
    for block in blocks:
        attention, ffn = block.get("attention") or {}, block.get("ffn") or {}
        replaced = [
            part
            for part, fields_of_part in (("attention", attention), ("mlp", ffn))
            if fields_of_part.get("replace_with_linear")
        ]
        attends = not (attention.get("no_op") or "attention" in replaced)
        has_ffn = not (ffn.get("no_op") or "mlp" in replaced)
        extras: tuple[Extra, ...] = ()
        for part in replaced:  # a norm, and one matrix in place of attention or feed-forward
            extras += (matrix(f"{part}_linear", "Dh", "D", h=fields["d_model"]),)
            extras += (Extra(f"{part}_linear_norm", "D"),)
        layers.append(
            {
                "num_kv_heads": fields["num_heads"] // (attention.get("n_heads_in_group") or 1)
                if attends
                else fields["num_heads"],
                "d_ff": _width(ffn, fields["d_model"]) if has_ffn else fields["d_model"],
                "extras": extras,
            }
        )
        mixers.append("attention" if attends else "none")
        feed_forwards.append("dense" if has_ffn else "none")
    # A layer without both is left out: it only adds nothing to its input.
    kept = [n for n in range(len(blocks)) if (mixers[n], feed_forwards[n]) != ("none", "none")]
    return {
        "num_layers": len(kept),
        "mixers": tuple(mixers[n] for n in kept),
        "feed_forwards": tuple(feed_forwards[n] for n in kept),
    } | by_layer([layers[n] for n in kept])


_KEYS = without(LLAMA_KEYS, "intermediate_size", "num_key_value_heads")

FAMILY = Family(
    "deci_lm",
    "Llama Nemotron (Puzzle)",
    ("DeciLMForCausalLM",),
    model_types=("nemotron-nas", "deci"),
    keys=_KEYS
    | ATTENTION_BIAS
    | EPS_1E_5
    | {"mlp_bias": Key("mlp_bias", False)}
    | ignored(
        "its blocks say it", "num_key_value_heads", "num_key_value_heads_per_layer", "intermediate_size"
    )
    | ignored("planned only, and positions change no plan", "rope_theta", "rope_scaling", "rope_parameters")
    | ignored("how transformers runs it", "target_hardware", "eos_token_id_list"),
    sets={"planned_only": "blocks of several shapes (Llama Nemotron)"},
    groups=(ByLayer(_read, {"block_configs": ("variants", "mixers", "feed_forwards")}),),
    tensors={},
    is_written=False,
)
