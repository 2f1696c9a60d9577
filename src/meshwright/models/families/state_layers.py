"""Keys of config.json that say which layers keep a state, and tensors of such layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Key, Part, Rule, Tensor, needed
from meshwright.models.families.tensors import LAYER, fused, linear

# The names of layers in lists of transformers 5, and in older files.
ATTENTION_NAMES = ("full_attention", "attention")
STATE_NAMES = ("linear_attention", "mamba", "conv")


@dataclass(frozen=True)
class StateLayers:
    """The list of mixers, or an interval: each n-th layer has attention and the others a state.

    key: of the list. every: the default of `interval`; None if the family has no such key. state: the name of
    layers with a state as it is written. numbers: a key with the numbers of the layers with attention.
    flags: a key with 1 for each of them.
    """

    key: str = "layer_types"
    every: int | None = None
    interval: str = "full_attention_interval"
    state: str = "linear_attention"
    numbers: str | None = None
    flags: str | None = None

    @property
    def parts(self) -> Mapping[str, Part]:
        keys = {self.key: Part(("mixers",), (list,))}
        keys |= {self.interval: Part(("mixers",), (int,))} if self.every else {}
        keys |= {self.flags: Part(("mixers",), (list,))} if self.flags else {}
        return keys | ({self.numbers: Part(("mixers",), (list,))} if self.numbers else {})

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        num_layers = fields["num_layers"]
        if listed := given.get(self.key):
            return {"mixers": tuple(self._mixer(kind, name) for kind in listed)}
        if self.numbers and (numbers := given.get(self.numbers)) is not None:
            return {"mixers": tuple(_mixer_at(n in numbers) for n in range(num_layers))}
        if self.flags and (flags := given.get(self.flags)):
            return {"mixers": tuple(_mixer_at(flag == 1) for flag in flags)}
        every = given.get(self.interval) or self.every
        if every is None:
            return {"mixers": ("state",) * num_layers}
        return {"mixers": tuple(_mixer_at((n + 1) % every == 0) for n in range(num_layers))}

    def _mixer(self, kind: Any, name: str) -> str:
        if kind in ATTENTION_NAMES:
            return "attention"
        if kind in STATE_NAMES:
            return "state"
        raise ModelError(f"{name}: {self.key} has {kind!r}; fits: {ATTENTION_NAMES[0]!r} and {self.state!r}")

    def write(self, model: ModelConfig) -> dict[str, Any]:
        attends = [layer.kind.attends for layer in model.layers]
        if self.numbers and self.key not in ("layer_types",):
            return {self.numbers: [n for n, one in enumerate(attends) if one]}
        return {self.key: [ATTENTION_NAMES[0] if one else self.state for one in attends]}


def _mixer_at(attends: bool) -> str:
    return "attention" if attends else "state"


# The gated delta rule of Qwen3-Next and 3.5

DELTA_KEYS: dict[str, Rule] = {
    "linear_num_key_heads": Key("delta.num_key_heads", 16),
    "linear_num_value_heads": Key("delta.num_value_heads", 32),
    "linear_key_head_dim": Key("delta.key_dim", 128),
    "linear_value_head_dim": Key("delta.value_dim", 128),
    "linear_conv_kernel_dim": Key("delta.conv_width", 4),
}
_DELTA = f"{LAYER}.linear_attn"
_CONVOLVED = ("gs", "gs", "gup")
DELTA_TENSORS = {
    **{
        name: Tensor(f"{_DELTA}.conv1d.weight", (part, "", "c"), 0, _CONVOLVED, index)
        for index, (name, part) in enumerate(zip(("conv_q", "conv_k", "conv_v"), _CONVOLVED, strict=True))
    },
    "decay_log": Tensor(f"{_DELTA}.A_log", ("gu",)),
    "decay_bias": Tensor(f"{_DELTA}.dt_bias", ("gu",)),
    "state_norm": Tensor(f"{_DELTA}.norm.weight", ("p",)),
    "state_out": Tensor(f"{_DELTA}.out_proj.weight", ("D", "gup")),
}
# Qwen3-Next's, by key heads.
FUSED_DELTA_TENSORS = DELTA_TENSORS | {
    **fused(
        ("state_q", "state_k", "state_v", "state_gate"),
        f"{_DELTA}.in_proj_qkvz",
        ("gs", "gs", "gup", "gup"),
        arranged="within",
    ),
    **fused(("state_beta", "state_decay"), f"{_DELTA}.in_proj_ba", ("gu", "gu"), arranged="within"),
}
# Qwen3.5's, one after the other.
SPLIT_DELTA_TENSORS = DELTA_TENSORS | {
    **fused(("state_q", "state_k", "state_v"), f"{_DELTA}.in_proj_qkv", _CONVOLVED),
    **linear("state_gate", f"{_DELTA}.in_proj_z", "gup", "D"),
    **linear("state_beta", f"{_DELTA}.in_proj_b", "gu", "D"),
    **linear("state_decay", f"{_DELTA}.in_proj_a", "gu", "D"),
}
# Queries, and the gate of attention's result, by heads.
GATED_QUERIES = fused(("wq", "wg"), f"{LAYER}.self_attn.q_proj", ("NH", "NH"), arranged="within")

# Mamba-2

_INTO = ("state_gate", "state_x", "state_b", "state_c", "state_step")
_INTO_PARTS = ("gup", "gup", "gs", "gs", "gu")
_CONV = ("conv_x", "conv_b", "conv_c")
_CONV_PARTS = ("gup", "gs", "gs")


def mamba_tensors(module: str) -> dict[str, Tensor]:
    """The tensors of a Mamba-2 mixer."""
    taps = {
        name: Tensor(f"{module}.conv1d.weight", (part, "", "c"), 0, _CONV_PARTS, index)
        for index, (name, part) in enumerate(zip(_CONV, _CONV_PARTS, strict=True))
    }
    biases = {
        f"{name}_bias": Tensor(f"{module}.conv1d.bias", (part,), 0, _CONV_PARTS, index)
        for index, (name, part) in enumerate(zip(_CONV, _CONV_PARTS, strict=True))
    }
    return (
        fused(_INTO, f"{module}.in_proj", _INTO_PARTS)
        | taps
        | biases
        | {
            "step_bias": Tensor(f"{module}.dt_bias", ("gu",)),
            "decay_log": Tensor(f"{module}.A_log", ("gu",)),
            "skip": Tensor(f"{module}.D", ("gu",)),
            "state_norm": Tensor(f"{module}.norm.weight", ("gup",)),
        }
        | linear("state_out", f"{module}.out_proj", "D", "gup")
    )


MAMBA_KEYS: dict[str, Rule] = {
    "mamba_n_heads": needed("state_space.num_heads"),
    "mamba_d_head": needed("state_space.head_dim"),
    "mamba_d_state": needed("state_space.state_dim"),
    "mamba_n_groups": Key("state_space.num_groups", 1),
    "mamba_d_conv": Key("state_space.conv_width", 4),
    "mamba_conv_bias": Key("state_space.conv_bias", True),
    "mamba_proj_bias": Key("state_space.proj_bias", False),
}

# Mamba

_READ = ("state_down", "state_b", "state_c")


def selective_tensors(module: str) -> dict[str, Tensor]:
    """The tensors of a Mamba mixer."""
    return (
        fused(("state_x", "state_gate"), f"{module}.in_proj", ("u", "u"))
        | {
            "conv_x": Tensor(f"{module}.conv1d.weight", ("u", "", "c")),
            "conv_x_bias": Tensor(f"{module}.conv1d.bias", ("u",)),
            "state_step": Tensor(f"{module}.dt_proj.weight", ("u", "r")),
            "step_bias": Tensor(f"{module}.dt_proj.bias", ("u",)),
            "decay_log": Tensor(f"{module}.A_log", ("u", "s")),
            "skip": Tensor(f"{module}.D", ("u",)),
        }
        | fused(_READ, f"{module}.x_proj", ("r", "s", "s"), "u")
        | linear("state_out", f"{module}.out_proj", "D", "u")
    )
