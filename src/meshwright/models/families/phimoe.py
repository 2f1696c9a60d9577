from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Part, fixed, ignored, needed
from meshwright.models.families.keys import EPS_1E_5, EXPERTS, LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts, linear


class _Magnitude:
    """`short_mscale` and `long_mscale` of LongRoPE: cosines and sines are multiplied by it."""

    parts: Mapping[str, Part] = {}

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        table = given.get("rope_parameters") or given.get("rope_scaling") or {}
        short, long = table.get("short_mscale"), table.get("long_mscale")
        if short != long:
            raise ModelError(
                f"{name}: long_mscale = {long} is not supported; fits: {short}, the short_mscale"
            )
        scaling = fields.get("rope_scaling")
        return {"rope_scaling": replace(scaling, attention_factor=short)} if scaling and short else {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


FAMILY = Family(
    "phimoe",
    "Phi-3.5-MoE",
    ("PhimoeForCausalLM",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | EXPERTS
    | {
        "attention_bias": Key(("qkv_bias", "attention_out_bias"), False),
        "intermediate_size": needed(("d_ff", "moe.d_ff")),
        "lm_head_bias": Key("head_bias", False),
    }
    | fixed(router_jitter_noise=0.01)
    | ignored("training only", "input_jitter_noise", "hidden_dropout"),
    sets={"norm": "layer", "norm_bias": True, "moe.score": "sparsemixer"},
    groups=(LocalLayers(), Rope(theta=1e6), _Magnitude()),
    tensors=LLAMA_TENSORS
    | experts(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2"))
    | linear("unembed", "lm_head", "V", "D"),
)
