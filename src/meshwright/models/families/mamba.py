from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, Fixed, Key, Rule, Tensor, ignored, needed
from meshwright.models.families.keys import ACTIVATION
from meshwright.models.families.state_layers import selective_tensors
from meshwright.models.families.tensors import HEAD
from meshwright.models.mixers import Selective

# A state has no heads. These only bound the degree of a tensor axis.
_HEAD = 64


def read_blocks(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Blocks that all have the same mixer and no feed-forward."""
    d_model, rank = fields["d_model"], given.get("time_step_rank", "auto")
    width = given.get("intermediate_size") or given.get("expand", 2) * d_model
    mixer = Selective(
        width,
        given.get("state_size", 16),
        -(-d_model // 16) if rank == "auto" else rank,
        given.get("conv_kernel", 4),
        given.get("use_conv_bias", True),
        given.get("use_bias", False),
    )
    return {"selective": mixer} | of_blocks(max(1, width // _HEAD), _HEAD, width)


def of_blocks(num_heads: int, d_head: int, width: int) -> dict[str, Any]:
    """The fields of a model whose blocks are all states."""
    return {
        "mixers": ("state",),
        "feed_forwards": ("none",),
        "positions": "none",
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "d_head": d_head,
        "d_ff": width,
    }


BLOCK_KEYS: dict[str, Rule] = {
    "num_hidden_layers": needed("num_layers", "n_layer"),
    "hidden_size": needed("d_model", "d_model"),
    "vocab_size": needed("vocab_size"),
    "layer_norm_epsilon": Key("norm_eps", 1e-5),
    "hidden_act": Key("activation", "silu", form=ACTIVATION),
    # It has no longest context: states do not grow.
    "max_position_embeddings": Key("max_seq_len", 1_048_576),
} | ignored(
    "how transformers runs it or starts its weights",
    "initializer_range", "residual_in_fp32", "rescale_prenorm_residual", "time_step_floor",
    "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale", "use_mambapy",
    "use_associative_scan", "fused_add_norm", "rms_norm", "ssm_cfg", "pad_vocab_size_multiple", "d_inner",
    "use_falcon_mambapy", "use_falcon_mamba_scan",
)  # fmt: skip
# Keys by the field of the mixer.
_WRITTEN = {
    "width": "intermediate_size",
    "state_dim": "state_size",
    "step_rank": "time_step_rank",
    "conv_width": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "proj_bias": "use_bias",
    "plain_norm_eps": "mixer_rms_eps",
}


@dataclass(frozen=True)
class SelectiveBlocks(ByLayer):
    """The keys of models whose blocks are all selective state spaces."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        fields = (field.partition(".")[2] for (field,) in self.keys.values())
        return {_WRITTEN[field]: getattr(model.selective, field) for field in fields}


SELECTIVE_KEYS = {
    "expand": ("selective.width",),
    "intermediate_size": ("selective.width",),
    "state_size": ("selective.state_dim",),
    "time_step_rank": ("selective.step_rank",),
    "conv_kernel": ("selective.conv_width",),
    "use_conv_bias": ("selective.conv_bias",),
    "use_bias": ("selective.proj_bias",),
}
_LAYER = "backbone.layers.{}"
OUTER_TENSORS = {
    "embed": Tensor("backbone.embeddings.weight", ("V", "D")),
    "attention_norm": Tensor(f"{_LAYER}.norm.weight", ("D",)),
    "final_norm": Tensor("backbone.norm_f.weight", ("D",)),
    **HEAD,
}
BLOCK_TENSORS = OUTER_TENSORS | selective_tensors(f"{_LAYER}.mixer")

FAMILY = Family(
    "mamba",
    "Mamba",
    ("MambaForCausalLM",),
    keys=BLOCK_KEYS | {"tie_word_embeddings": Fixed((True,))},
    sets={"tied_embeddings": True, "num_heads": 1},
    groups=(SelectiveBlocks(read_blocks, SELECTIVE_KEYS),),
    tensors=BLOCK_TENSORS,
)
