from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, Fixed, Key, ignored
from meshwright.models.families.mamba import BLOCK_KEYS, OUTER_TENSORS, of_blocks
from meshwright.models.families.state_layers import mamba_tensors
from meshwright.models.mixers import StateSpace


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_heads, head_dim = given.get("num_heads", 128), given.get("head_dim", 64)
    mixer = StateSpace(
        num_heads,
        head_dim,
        given.get("state_size", 128),
        given.get("n_groups", 8),
        given.get("conv_kernel", 4),
        given.get("use_conv_bias", True),
        given.get("use_bias", False),
    )
    return {"state_space": mixer} | of_blocks(num_heads, head_dim, num_heads * head_dim)


@dataclass(frozen=True)
class _Blocks(ByLayer):
    def write(self, model: ModelConfig) -> dict[str, Any]:
        mixer = model.state_space
        assert mixer is not None, "all blocks are states"
        written = {key: getattr(mixer, field.partition(".")[2]) for key, (field,) in self.keys.items()}
        return written | {"expand": mixer.num_heads * mixer.head_dim // model.d_model}


FAMILY = Family(
    "mamba2",
    "Mamba-2",
    ("Mamba2ForCausalLM",),
    keys=BLOCK_KEYS
    | {"tie_word_embeddings": Key("tied_embeddings", False)}
    | {"rms_norm": Fixed((True,)), "norm_before_gate": Fixed((True, False))}
    | ignored("follows from its heads", "expand", "time_step_rank")
    | ignored("how transformers runs it", "chunk_size", "time_step_limit"),
    sets={"num_heads": 1},
    groups=(
        _Blocks(
            _read,
            {
                "num_heads": ("state_space.num_heads",),
                "head_dim": ("state_space.head_dim",),
                "state_size": ("state_space.state_dim",),
                "n_groups": ("state_space.num_groups",),
                "conv_kernel": ("state_space.conv_width",),
                "use_conv_bias": ("state_space.conv_bias",),
                "use_bias": ("state_space.proj_bias",),
            },
        ),
    ),
    tensors=OUTER_TENSORS | mamba_tensors("backbone.layers.{}.mixer"),
)
