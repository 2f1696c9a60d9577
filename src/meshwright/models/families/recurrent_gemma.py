from collections.abc import Mapping
from math import frexp, ldexp
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Form, Key, Part, Tensor, ignored, without
from meshwright.models.families.gemma_keys import GEMMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import (
    EMBEDDING,
    HEAD,
    LAYER,
    PROJECTIONS,
    feed_forward,
    linear,
    norms,
)
from meshwright.models.mixers import LinearUnit

_MIXERS = {"recurrent": "state", "attention": "attention"}


class _Blocks:
    """The kinds of blocks, which repeat; the sizes of recurrent blocks; the factor of embeddings."""

    parts: Mapping[str, Part] = {
        "block_types": Part(("mixers",), (list,)),
        "lru_width": Part(("linear_unit.num_blocks", "linear_unit.block_width"), (int,)),
        "conv1d_width": Part(("linear_unit.conv_width",), (int,)),
        "embeddings_scale_by_sqrt_dim": Part(("embedding_scale",), (bool,)),
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        kinds = given.get("block_types") or ["recurrent", "recurrent", "attention"]
        if unknown := [kind for kind in kinds if kind not in _MIXERS]:
            raise ModelError(f"{name}: block_types has {unknown[0]!r}; fits: {', '.join(_MIXERS)}")
        num_blocks, width = fields["num_heads"], given.get("lru_width") or fields["d_model"]
        if width % num_blocks:
            raise ModelError(
                f"{name}: lru_width = {width} does not divide into num_attention_heads = {num_blocks} blocks"
            )
        mixer = LinearUnit(num_blocks, width // num_blocks, given.get("conv1d_width", 4))
        read = {"mixers": tuple(map(_MIXERS.__getitem__, kinds)), "linear_unit": mixer}
        if given.get("embeddings_scale_by_sqrt_dim", True):
            read["embedding_scale"] = _in_bf16(fields["d_model"] ** 0.5)
        return read

    def write(self, model: ModelConfig) -> dict[str, Any]:
        mixer = model.linear_unit
        assert mixer is not None, "every RecurrentGemma has recurrent blocks"
        return {
            "block_types": ["attention" if layer.kind.attends else "recurrent" for layer in model.layers],
            "lru_width": mixer.num_blocks * mixer.block_width,
            "conv1d_width": mixer.conv_width,
            "embeddings_scale_by_sqrt_dim": model.embedding_scale is not None,
        }


def _in_bf16(value: float) -> float:
    """`value` rounded to the eight significant bits of bf16, since transformers stores the factor in bf16."""
    mantissa, exponent = frexp(value)
    return ldexp(round(mantissa * 2**8), exponent - 8)


_BLOCK, _UNIT = f"{LAYER}.temporal_block", f"{LAYER}.temporal_block.rg_lru"
# The file's width is the sum of the widths of the gate and input matrices.
_HALF = Form(lambda value: value // 2, lambda value, model: 2 * value)

FAMILY = Family(
    "recurrent_gemma",
    "RecurrentGemma",
    ("RecurrentGemmaForCausalLM",),
    keys=without(GEMMA_KEYS, "attention_bias")
    | {
        "intermediate_size": Key("d_ff", needed=True, form=_HALF),
        "head_dim": Key("d_head"),
        "attention_bias": Key("qkv_bias", False),
        "attention_window_size": Key("sliding_window", 2048),
        "logits_soft_cap": Key("logit_softcap", 30.0),
        # The file names no longest context, and needs none: states and windows do not grow.
        "max_position_embeddings": Key("max_seq_len", 1_048_576),
    }
    | ignored("how transformers starts its weights", "w_init_variance_scale", "final_w_init_variance_scale")
    | ignored("repeats block_types", "_block_types", "layers_block_type", "layer_types"),
    sets={"norm_offset": True, "attention_out_bias": True, "mlp_bias": True},
    groups=(_Blocks(), Rope(share=0.5)),
    tensors=EMBEDDING
    | norms("attention_norm", f"{LAYER}.temporal_pre_norm")
    | linear("wq", f"{_BLOCK}.q_proj", "NH", "D")
    | linear("wk", f"{_BLOCK}.k_proj", "KH", "D")
    | linear("wv", f"{_BLOCK}.v_proj", "KH", "D")
    | linear("wo", f"{_BLOCK}.o_proj", "D", "NH")
    | linear("state_gate", f"{_BLOCK}.linear_y", "gu", "D")
    | linear("state_x", f"{_BLOCK}.linear_x", "gu", "D")
    | linear("state_out", f"{_BLOCK}.linear_out", "D", "gu")
    | {
        "conv_x": Tensor(f"{_BLOCK}.conv_1d.weight", ("gu", "", "c")),
        "conv_x_bias": Tensor(f"{_BLOCK}.conv_1d.bias", ("gu",)),
        "input_gate": Tensor(f"{_UNIT}.input_gate_weight", ("g", "u", "o")),
        "input_gate_bias": Tensor(f"{_UNIT}.input_gate_bias", ("g", "o")),
        "decay_gate": Tensor(f"{_UNIT}.recurrent_gate_weight", ("g", "u", "o")),
        "decay_gate_bias": Tensor(f"{_UNIT}.recurrent_gate_bias", ("g", "o")),
        "decay_rate": Tensor(f"{_UNIT}.recurrent_param", ("gu",)),
    }
    | norms("mlp_norm", f"{LAYER}.channel_pre_norm")
    | feed_forward("w", f"{LAYER}.mlp_block", "F", PROJECTIONS)
    | norms("final_norm", "model.final_norm")
    | HEAD,
)
