from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, by_layer, listed
from meshwright.models.families.family import Family, Key, fixed, ignored, needed
from meshwright.models.families.keys import ACTIVATION, PLANNED_POSITIONS
from meshwright.models.families.releases import published, release


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
    releases=release(
        "Mehta et al. 2024, https://arxiv.org/abs/2404.14619; config.json of apple/OpenELM-3B",
        {
            "openelm-3b": published(
                "H=128, V=32_000",
                3_036_647_424,
                num_transformer_layers=36,
                model_dim=3072,
                normalize_qk_projections=True,
                ffn_multipliers=[
                    *(0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0),
                    *(2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6),
                    *(3.7, 3.8, 3.9, 4.0),
                ],
                num_query_heads=[12] * 4 + [16] * 14 + [20] * 12 + [24] * 6,
                num_kv_heads=[3] * 4 + [4] * 14 + [5] * 12 + [6] * 6,
            )
        },
    ),
)
