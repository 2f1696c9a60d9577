from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, by_layer, listed
from meshwright.models.families.family import Family, Key, fixed, ignored, needed
from meshwright.models.families.keys import ACTIVATION, PLANNED_POSITIONS


def _rounded(width: float, divisor: int) -> int:
    """A multiple of the divisor near the width, at most a tenth below it."""
    nearest = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * width else nearest


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers, d_model = fields["num_layers"], fields["d_model"]
    divisor = given.get("ffn_dim_divisor", 256)
    heads = listed(given, "num_query_heads", None, num_layers)
    kv_heads = listed(given, "num_kv_heads", None, num_layers)
    ratios = listed(given, "ffn_multipliers", 4.0, num_layers)
    layers = [
        {
            "num_heads": heads[n],
            "num_kv_heads": kv_heads[n] or heads[n],
            "d_ff": _rounded(ratios[n] * d_model, divisor),
        }
        for n in range(num_layers)
    ]
    return by_layer(layers)


_OF_LAYERS = {"num_query_heads": ("num_heads",), "num_kv_heads": ("num_kv_heads",)}
_OF_LAYERS |= {"ffn_multipliers": ("d_ff",), "ffn_dim_divisor": ("d_ff",)}

FAMILY = Family(
    "openelm",
    "OpenELM",
    ("OpenELMForCausalLM",),
    keys={
        "num_transformer_layers": needed("num_layers"),
        "model_dim": needed("d_model"),
        "head_dim": needed(("d_head", "num_heads")),
        "vocab_size": needed("vocab_size"),
        "max_context_length": Key("max_seq_len", 2048),
        "activation_fn_name": Key("activation", "silu", form=ACTIVATION),
        "normalize_qk_projections": Key("qk_norm", False),
        "share_input_output_layers": Key("tied_embeddings", True),
    }
    | PLANNED_POSITIONS
    | fixed(ffn_with_glu=True, normalization_layer_name="rms_norm")
    | ignored("planned only, and positions change no plan", "rope_freq_constant", "rope_max_length")
    | ignored("its lists of heads say it", "num_gqa_groups", "qkv_multipliers"),
    sets={"planned_only": "layers of several widths (OpenELM)"},
    groups=(ByLayer(_read, _OF_LAYERS),),
    tensors={},
    is_written=False,
)
