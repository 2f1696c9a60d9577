from collections.abc import Mapping
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Part, fixed
from meshwright.models.families.keys import LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS


class _Scales:
    """Factors of the embedding, of what layers add, and of logits."""

    parts: Mapping[str, Part] = {
        "scale_emb": Part(("embedding_scale",), (int, float)),
        "scale_depth": Part(("residual_scale",), (int, float)),
        "dim_model_base": Part(("logit_scale",), (int, float)),
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        depth, base = given.get("scale_depth") or 1.0, given.get("dim_model_base")
        return {
            "embedding_scale": float(given.get("scale_emb") or 1.0),
            "residual_scale": depth / fields["num_layers"] ** 0.5,
            "logit_scale": base / fields["d_model"] if base else None,
        }

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


FAMILY = Family(
    "minicpm",
    "MiniCPM 1, 4",
    ("MiniCPMForCausalLM",),
    keys=LLAMA_KEYS | {"tie_word_embeddings": Key("tied_embeddings", True)} | fixed(attention_bias=False),
    groups=(_Scales(), Rope()),
    tensors=LLAMA_TENSORS,
    is_written=False,
)
