from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Part, fixed
from meshwright.models.families.keys import EPS_1E_5, FACTOR, LATENT, SIZES
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LATENT_TENSORS, LLAMA_TENSORS


class _Scales:
    """Residuals are scaled by the number of layers, logits by the width (Yang et al., 2022)."""

    parts: Mapping[str, Part] = {
        "scale_depth": Part(("residual_scale",), (int, float)),
        "dim_model_base": Part(("logit_scale",), (int, float)),
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        depth, base = given.get("scale_depth", 1.4), given.get("dim_model_base", 256)
        return {
            "residual_scale": depth / fields["num_layers"] ** 0.5,
            "logit_scale": base / fields["d_model"],
        }

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "scale_depth": (model.residual_scale or 1.0) * model.num_layers**0.5,
            "dim_model_base": round((model.logit_scale or 1.0) * model.d_model),
        }


FAMILY = Family(
    "minicpm3",
    "MiniCPM 3",
    ("MiniCPM3ForCausalLM",),
    keys=SIZES
    | EPS_1E_5
    | LATENT
    | {
        "v_head_dim": Key("mla.value_dim"),
        "scale_emb": Key("embedding_scale", 12, form=FACTOR),
        "tie_word_embeddings": Key("tied_embeddings", True),
    }
    | fixed(attention_bias=False, mlp_bias=False),
    groups=(_Scales(), Rope()),
    # Its rotary positions turn halves.
    tensors=LLAMA_TENSORS | {name: replace(tensor, pairs="") for name, tensor in LATENT_TENSORS.items()},
)
