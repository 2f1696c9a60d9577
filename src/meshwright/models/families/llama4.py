from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Part, Tensor, ignored, needed
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, EXPERTS, LLAMA_KEYS
from meshwright.models.families.layers import CHUNKED_LAYERS, UnturnedLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import (
    LAYER,
    LLAMA_TENSORS,
    PROJECTIONS,
    feed_forward,
    gate_up,
    in_pairs,
)

_MLP = f"{LAYER}.feed_forward"
_FLOOR_SCALE = 8192


class _Llama4Layers:
    """Whether queries without rotary positions have a temperature, and the list of layers with experts."""

    parts: Mapping[str, Part] = {
        "attn_temperature_tuning": Part(("temperature_floor",)),
        "moe_layers": Part(("moe",), (list,)),
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        step, listed = fields["moe"].every, given.get("moe_layers")
        if listed is not None and listed != list(range(step - 1, fields["num_layers"], step)):
            raise ModelError(
                f"{name}: moe_layers = {listed} is not supported; fits: every n-th layer, as "
                "interleave_moe_layer_step = n says"
            )
        is_tuned = given.get("attn_temperature_tuning", True) and fields["nope_every"]
        return {} if is_tuned else {"temperature_floor": None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "attention_chunk_size": model.attention_chunk or model.max_seq_len,
            "attn_temperature_tuning": model.temperature_floor is not None,
            "floor_scale": model.temperature_floor or _FLOOR_SCALE,
        }


FAMILY = Family(
    "llama4",
    "Llama 4 (text)",
    ("Llama4ForCausalLM",),
    model_types=("llama4_text",),
    wrappers=("llama4",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | EPS_1E_5
    | EXPERTS
    | {
        "intermediate_size_mlp": needed("d_ff"),
        "intermediate_size": needed("moe.d_ff"),
        "interleave_moe_layer_step": Key("moe.every", 1),
        "use_qk_norm": Key("turned_norm", True),
        "floor_scale": Key("temperature_floor", _FLOOR_SCALE),
        "attn_scale": Key("temperature_slope", 0.1),
    }
    | ignored("how transformers runs it", "cache_implementation", "_attn_implementation_autoset")
    | ignored("how weights are stored", "for_llm_compressor"),
    sets={
        "moe.num_shared_experts": 1,
        "moe.score": "sigmoid",
        "moe.normalized": False,
        "moe.scales_input": True,
    },
    groups=(UnturnedLayers(every=4), CHUNKED_LAYERS, _Llama4Layers(), Rope(theta=500_000.0)),
    tensors=LLAMA_TENSORS
    | in_pairs(LLAMA_TENSORS, "wq", "wk", "wq_bias", "wk_bias")
    | feed_forward("w", _MLP, "F", PROJECTIONS)
    | feed_forward("shared", f"{_MLP}.shared_expert", "U", PROJECTIONS)
    | {"router": Tensor(f"{_MLP}.router.weight", ("E", "D"))}
    | gate_up(f"{_MLP}.experts"),
)
