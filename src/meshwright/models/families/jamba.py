from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, Key, Tensor, fixed, ignored, needed, without
from meshwright.models.families.keys import EXPERTS, LLAMA_KEYS
from meshwright.models.families.state_layers import selective_tensors
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, PROJECTIONS, feed_forward
from meshwright.models.mixers import Selective


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    layers, d_model = range(fields["num_layers"]), fields["d_model"]
    every, first = given.get("attn_layer_period", 8), given.get("attn_layer_offset", 4)
    mixers = tuple("attention" if n % every == first else "state" for n in layers)
    if kinds := given.get("layers_block_type") or given.get("layer_types"):
        mixers = tuple("attention" if kind == "attention" or "full" in kind else "state" for kind in kinds)
    every, first = given.get("expert_layer_period", 2), given.get("expert_layer_offset", 1)
    has_experts = given.get("num_experts", 16) > 1
    feed_forwards = tuple("experts" if has_experts and n % every == first else "dense" for n in layers)
    rank = given.get("mamba_dt_rank", "auto")
    mixer = Selective(
        given.get("mamba_expand", 2) * d_model,
        given.get("mamba_d_state", 16),
        -(-d_model // 16) if rank == "auto" else rank,
        given.get("mamba_d_conv", 4),
        given.get("mamba_conv_bias", True),
        given.get("mamba_proj_bias", False),
        norms=True,
    )
    read = {"selective": mixer, "mixers": mixers, "feed_forwards": feed_forwards}
    return read | ({} if has_experts else {"moe": None})


@dataclass(frozen=True)
class _Layers(ByLayer):
    def write(self, model: ModelConfig) -> dict[str, Any]:
        mixer, d_model = model.selective, model.d_model
        assert mixer is not None, "every Jamba has states"
        attends = [layer.kind.attends for layer in model.layers]
        has_experts = [model.moe is not None and layer.kind.stack in _EXPERT_STACKS for layer in model.layers]
        return {
            **_period("attn_layer", attends),
            **_period("expert_layer", has_experts),
            "mamba_expand": mixer.width // d_model,
            "mamba_d_state": mixer.state_dim,
            "mamba_dt_rank": mixer.step_rank,
            "mamba_d_conv": mixer.conv_width,
            "mamba_conv_bias": mixer.conv_bias,
            "mamba_proj_bias": mixer.proj_bias,
        } | ({} if model.moe else {"num_experts": 1})


def _period(prefix: str, chosen: Sequence[bool]) -> dict[str, Any]:
    """The keys of layers that repeat from the first chosen one on."""
    numbers = [number for number, one in enumerate(chosen) if one] or [len(chosen)]
    every = numbers[1] - numbers[0] if len(numbers) > 1 else len(chosen) + 1
    return {f"{prefix}_period": every, f"{prefix}_offset": numbers[0]}


_EXPERT_STACKS = ("layers", "state_layers")
_FEED_FORWARD, _MIXER = f"{LAYER}.feed_forward", f"{LAYER}.mamba"
_KEYS = without(EXPERTS, "num_local_experts")

FAMILY = Family(
    "jamba",
    "Jamba",
    ("JambaForCausalLM",),
    keys=LLAMA_KEYS
    | _KEYS
    | {
        "intermediate_size": needed(("d_ff", "moe.d_ff")),
        "num_experts": Key("moe.num_experts", 16),
        "max_position_embeddings": Key("max_seq_len", 262_144),
    }
    | fixed(sliding_window=None)
    | ignored(
        "how transformers runs it",
        "use_mamba_kernels", "num_logits_to_keep", "calc_logits_for_entire_prompt", "mamba_inner_layernorms",
        "use_associative_scan", "use_mambapy",
    )
    | ignored("its attention has no positions", "rope_theta", "rope_parameters"),
    sets={"positions": "none", "moe.normalized": False},
    optional=("moe",),
    groups=(
        _Layers(
            _read,
            {
                "attn_layer_period": ("mixers",),
                "attn_layer_offset": ("mixers",),
                "layers_block_type": ("mixers",),
                "layer_types": ("mixers",),
                "expert_layer_period": ("feed_forwards",),
                "expert_layer_offset": ("feed_forwards",),
                "mamba_expand": ("selective.width",),
                "mamba_d_state": ("selective.state_dim",),
                "mamba_dt_rank": ("selective.step_rank",),
                "mamba_d_conv": ("selective.conv_width",),
                "mamba_conv_bias": ("selective.conv_bias",),
                "mamba_proj_bias": ("selective.proj_bias",),
            },
        ),
    ),
    tensors=LLAMA_TENSORS
    | selective_tensors(_MIXER)
    | {
        "step_norm": Tensor(f"{_MIXER}.dt_layernorm.weight", ("r",)),
        "b_norm": Tensor(f"{_MIXER}.b_layernorm.weight", ("s",)),
        "c_norm": Tensor(f"{_MIXER}.c_layernorm.weight", ("s",)),
        "mlp_norm": Tensor(f"{LAYER}.pre_ff_layernorm.weight", ("D",)),
        "final_norm": Tensor("model.final_layernorm.weight", ("D",)),
        "router": Tensor(f"{_FEED_FORWARD}.router.weight", ("E", "D")),
    }
    | feed_forward("w", _FEED_FORWARD, "F", PROJECTIONS)
    | feed_forward("expert", f"{_FEED_FORWARD}.experts.{{}}", "M", PROJECTIONS),
)  # fmt: skip
