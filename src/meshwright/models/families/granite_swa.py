from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Part, Tensor
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS, MULTIPLIERS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS


class _LayerThetas:
    """`layer_rope_theta`: the base of every layer, which must be the same in all."""

    parts: Mapping[str, Part] = {"layer_rope_theta": Part(("rope_theta",), (list,))}

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        thetas = given.get("layer_rope_theta")
        if not thetas:
            return {}
        if len(set(thetas)) > 1 or not thetas[0]:
            raise ModelError(
                f"{name}: this layer_rope_theta is not supported; fits: one number for all layers"
            )
        return {"rope_theta": thetas[0]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"layer_rope_theta": [model.rope_theta] * model.num_layers}


LAYER_THETAS = _LayerThetas()
SINKS = {"sinks": Tensor(f"{LAYER}.self_attn.sinks", ("N",))}


FAMILY = Family(
    "granite_swa",
    "Granite Swash",
    ("GraniteSWAForCausalLM",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | ATTENTION_BIAS
    | MULTIPLIERS
    | {"mlp_bias": Key("mlp_bias", False), "tie_word_embeddings": Key("tied_embeddings", True)},
    sets={"attention_sinks": True},
    groups=(LocalLayers(window=128, global_every=4), Rope(), LAYER_THETAS),
    tensors=LLAMA_TENSORS | SINKS,
)
