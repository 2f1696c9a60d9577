"""The tensors of Hugging Face checkpoints that hold our parameters.

HF stores a linear layer as [out, in] (GPT-2 as [in, out]) with its heads flattened, one tensor a layer;
ours keep every letter and stack the layers: q_proj[N·H, D] of layers 0..L-1 <-> wq[L, D, N, H].
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np

from meshwright.models.config import ModelConfig
from meshwright.models.hf import to_hf
from meshwright.models.parameters import parameters

UNEMBED = "lm_head.weight"
# Of models that also see.
_LANGUAGE_MODEL, _SEES = "language_model.", ("vision_model.", "vision_tower.", "multi_modal_projector.")


Arrangement = Literal["after", "within", "alternate"]


@dataclass(frozen=True)
class HfTensor:
    """The place of a parameter in a checkpoint: the tensor's name, and its letters.

    In the name the first `{}` stands for the layer, and one after it for the expert, where each expert has
    a tensor of its own. parts: where several parameters share a tensor along `axis`, the letters of each
    there; ours is number `index` of them. arranged: the parts lie one after another; or `within` each entry
    of their first letter, which all have; or they `alternate` element by element. pairs: the letter whose
    last elements, as many as A has or all, positions turn in neighbouring pairs there, in ours as two halves.
    """

    name: str
    dims: tuple[str, ...]
    axis: int = 0
    parts: tuple[str, ...] = ()
    index: int = 0
    arranged: Arrangement = "after"
    pairs: str = ""

    @property
    def letters(self) -> str:
        return "".join(self.dims)

    @property
    def is_by_expert(self) -> bool:
        return self.name.count("{}") > 1

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The parameter's own shape, as it is stored."""
        return tuple(_flat(dim, sizes) for dim in self.dims)

    def stored_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the tensor that holds it."""
        shape = list(self.shape(sizes))
        if self.parts:
            shape[self.axis] = sum(_flat(part, sizes) for part in self.parts)
        return tuple(shape)

    def window(self, spans: Mapping[str, range], sizes: Mapping[str, int]) -> tuple[slice, ...]:
        """The slices of the tensor that hold these spans of the letters."""
        return tuple(self._slice(axis, spans, sizes) for axis in range(len(self.dims)))

    def _slice(self, axis: int, spans: Mapping[str, range], sizes: Mapping[str, int]) -> slice:
        """The rows of a flattened dimension such as N·H that hold a span of its first letter."""
        dim = self.dims[axis]
        outer, inner = dim[0], dim[1:]
        assert all(len(spans[letter]) == sizes[letter] for letter in inner), f"{inner} of {dim} is split"
        start, stride = 0, _flat(inner, sizes)
        if axis == self.axis and self.parts:
            before = [_flat(part, sizes) for part in self.parts[: self.index]]
            if self.arranged == "after":
                start = sum(before)
            elif self.arranged == "within":
                stride = sum(_flat(part[1:], sizes) for part in self.parts)
            else:
                stride = len(self.parts)
        return slice(start + spans[outer].start * stride, start + spans[outer].stop * stride)

    def taken(self, block: np.ndarray, spans: Mapping[str, range], sizes: Mapping[str, int]) -> np.ndarray:
        """This parameter alone, a dimension a letter, of what lies in the `window`."""
        shape = [len(spans[letter]) for letter in self.letters]
        if self.arranged == "within":
            width = [_flat(part[1:], sizes) for part in self.parts]
            start = sum(width[: self.index])
            outer = len(spans[self.dims[self.axis][0]])
            block = np.reshape(
                block, (*block.shape[: self.axis], outer, sum(width), *block.shape[self.axis + 1 :])
            )
            block = np.take(block, range(start, start + width[self.index]), axis=self.axis + 1)
        if self.arranged == "alternate":
            block = np.take(block, range(self.index, block.shape[self.axis], len(self.parts)), axis=self.axis)
        block = np.reshape(block, shape)
        if self.pairs:
            axis = self.letters.index(self.pairs)
            block = np.take(block, self._halves(sizes), axis=axis)
        return block

    def given(self, block: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """The parameter, a dimension a letter, as its part of the tensor: the way back of `taken`."""
        if self.pairs:
            axis = self.letters.index(self.pairs)
            block = np.take(block, np.argsort(self._halves(sizes)), axis=axis)
        return np.ascontiguousarray(block).reshape(self.shape(sizes))

    def _halves(self, sizes: Mapping[str, int]) -> list[int]:
        size = sizes[self.pairs]
        return _halves(size, sizes.get("A", size))


def joined(parts: Sequence[tuple[HfTensor, np.ndarray]], sizes: Mapping[str, int]) -> np.ndarray:
    """The tensor that these parameters, as `given`, share; or of one that has its own."""
    tensor, first = parts[0]
    if len(parts) == 1:
        return first
    arrays, axis = [array for _, array in parts], tensor.axis
    if tensor.arranged == "after":
        return np.concatenate(arrays, axis=axis)
    if tensor.arranged == "alternate":
        return np.stack(arrays, axis=axis + 1).reshape(tensor.stored_shape(sizes))
    outer = sizes[tensor.dims[axis][0]]
    split = [np.reshape(a, (*a.shape[:axis], outer, -1, *a.shape[axis + 1 :])) for a in arrays]
    return np.concatenate(split, axis=axis + 1).reshape(tensor.stored_shape(sizes))


def _halves(size: int, num_turned: int) -> list[int]:
    """Places in the file of the elements of a head: those before the turned ones, their evens, their odds.

    >>> _halves(6, 4)
    [0, 1, 2, 4, 3, 5]
    """
    start = size - num_turned
    return [*range(start), *range(start, size, 2), *range(start + 1, size, 2)]


def _flat(dim: str, sizes: Mapping[str, int]) -> int:
    return prod(sizes[letter] for letter in dim)


def hf_tensors(config: ModelConfig, stored: Collection[str] = ()) -> dict[str, HfTensor]:
    """The place of each parameter of `config`, in a checkpoint of these tensors or in one to be written."""
    if config.positions in ("learned", "alibi"):
        named = _GPT_2 if config.positions == "learned" else _BLOOM if config.embedding_norm else _MPT
        if stored and not any(name.startswith(_GPT_2_PREFIX) for name in stored):
            named = {path: _renamed(tensor, _GPT_2_PREFIX, "") for path, tensor in named.items()}
    else:
        named = dict(_LLAMA) | (_GEMMA_2_NORMS if config.post_norms else {})
        if any(name.endswith("qkv_proj.weight") for name in stored):
            named |= _PHI_3_FUSED
        if config.mla:
            named |= _LATENT
        if config.moe:
            named |= _experts(config, stored)
    if any(name.startswith(_LANGUAGE_MODEL) for name in stored):
        named = {path: _renamed(tensor, "", _LANGUAGE_MODEL) for path, tensor in named.items()}
    return {path: named[_of_any_stack(path)] for path in parameters(config)}


def _of_any_stack(path: str) -> str:
    stack, _, name = path.rpartition("/")
    return f"layers/{name}" if stack else name


def _experts(config: ModelConfig, stored: Collection[str]) -> dict[str, HfTensor]:
    """The tensors of a mixture: gpt-oss's with biases, Llama 4's, Mixtral's, or as all others name it."""
    assert config.moe is not None
    if config.moe.expert_bias:
        return _GPT_OSS
    if config.moe.scales_input:
        return _LLAMA_4
    if any("block_sparse_moe" in name for name in stored):
        return _MIXTRAL
    is_mixtral = not stored and to_hf(config)["model_type"] == "mixtral"
    return _MIXTRAL if is_mixtral else _QWEN_MOE


def passed_over(name: str) -> bool:
    """Whether files store this besides: rotary frequencies, causal masks, what sees beside the model."""
    return name.endswith(("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")) or name.startswith(_SEES)


def _renamed(tensor: HfTensor, old: str, new: str) -> HfTensor:
    return replace(tensor, name=new + tensor.name.removeprefix(old))


_LAYER, _ATTENTION, _MLP = "model.layers.{}", "model.layers.{}.self_attn", "model.layers.{}.mlp"
_LLAMA = {
    "embed": HfTensor("model.embed_tokens.weight", ("V", "D")),
    "layers/attention_norm": HfTensor(f"{_LAYER}.input_layernorm.weight", ("D",)),
    "layers/wq": HfTensor(f"{_ATTENTION}.q_proj.weight", ("NH", "D")),
    "layers/wk": HfTensor(f"{_ATTENTION}.k_proj.weight", ("KH", "D")),
    "layers/wv": HfTensor(f"{_ATTENTION}.v_proj.weight", ("KH", "D")),
    "layers/wo": HfTensor(f"{_ATTENTION}.o_proj.weight", ("D", "NH")),
    "layers/wq_bias": HfTensor(f"{_ATTENTION}.q_proj.bias", ("NH",)),
    "layers/wk_bias": HfTensor(f"{_ATTENTION}.k_proj.bias", ("KH",)),
    "layers/wv_bias": HfTensor(f"{_ATTENTION}.v_proj.bias", ("KH",)),
    "layers/wo_bias": HfTensor(f"{_ATTENTION}.o_proj.bias", ("D",)),
    "layers/q_norm": HfTensor(f"{_ATTENTION}.q_norm.weight", ("H",)),
    "layers/k_norm": HfTensor(f"{_ATTENTION}.k_norm.weight", ("H",)),
    "layers/mlp_norm": HfTensor(f"{_LAYER}.post_attention_layernorm.weight", ("D",)),
    "layers/w_gate": HfTensor(f"{_MLP}.gate_proj.weight", ("F", "D")),
    "layers/w_in": HfTensor(f"{_MLP}.up_proj.weight", ("F", "D")),
    "layers/w_out": HfTensor(f"{_MLP}.down_proj.weight", ("D", "F")),
    "layers/w_gate_bias": HfTensor(f"{_MLP}.gate_proj.bias", ("F",)),
    "layers/w_in_bias": HfTensor(f"{_MLP}.up_proj.bias", ("F",)),
    "layers/w_out_bias": HfTensor(f"{_MLP}.down_proj.bias", ("D",)),
    "final_norm": HfTensor("model.norm.weight", ("D",)),
    "unembed": HfTensor(UNEMBED, ("V", "D")),
}
# Gemma 2 and 3 call another norm what LLaMA calls post_attention_layernorm.
_GEMMA_2_NORMS = {
    "layers/attention_post_norm": HfTensor(f"{_LAYER}.post_attention_layernorm.weight", ("D",)),
    "layers/mlp_norm": HfTensor(f"{_LAYER}.pre_feedforward_layernorm.weight", ("D",)),
    "layers/mlp_post_norm": HfTensor(f"{_LAYER}.post_feedforward_layernorm.weight", ("D",)),
}
_QKV = ("NH", "KH", "KH")
_PHI_3_FUSED = {
    **{
        f"layers/{name}": HfTensor(f"{_ATTENTION}.qkv_proj.weight", (_QKV[index], "D"), 0, _QKV, index)
        for index, name in enumerate(("wq", "wk", "wv"))
    },
    **{
        f"layers/{name}": HfTensor(f"{_MLP}.gate_up_proj.weight", ("F", "D"), 0, ("F", "F"), index)
        for index, name in enumerate(("w_gate", "w_in"))
    },
}
_KV_UP = ("NJ", "NO")
_LATENT = {
    "layers/wq": HfTensor(f"{_ATTENTION}.q_proj.weight", ("NH", "D"), pairs="H"),
    "layers/wq_down": HfTensor(f"{_ATTENTION}.q_a_proj.weight", ("Q", "D")),
    "layers/q_latent_norm": HfTensor(f"{_ATTENTION}.q_a_layernorm.weight", ("Q",)),
    "layers/wq_up": HfTensor(f"{_ATTENTION}.q_b_proj.weight", ("NH", "Q"), pairs="H"),
    "layers/wkv_down": HfTensor(f"{_ATTENTION}.kv_a_proj_with_mqa.weight", ("R", "D"), 0, ("R", "A"), 0),
    "layers/wk_rope": HfTensor(
        f"{_ATTENTION}.kv_a_proj_with_mqa.weight", ("A", "D"), 0, ("R", "A"), 1, pairs="A"
    ),
    "layers/kv_latent_norm": HfTensor(f"{_ATTENTION}.kv_a_layernorm.weight", ("R",)),
    "layers/wk_up": HfTensor(f"{_ATTENTION}.kv_b_proj.weight", ("NJ", "R"), 0, _KV_UP, 0, "within"),
    "layers/wv_up": HfTensor(f"{_ATTENTION}.kv_b_proj.weight", ("NO", "R"), 0, _KV_UP, 1, "within"),
    "layers/wo": HfTensor(f"{_ATTENTION}.o_proj.weight", ("D", "NO")),
}
_EXPERT, _SHARED = f"{_MLP}.experts.{{}}", f"{_MLP}.shared_experts"
_QWEN_MOE = {
    "layers/router": HfTensor(f"{_MLP}.gate.weight", ("E", "D")),
    "layers/router_choice_bias": HfTensor(f"{_MLP}.gate.e_score_correction_bias", ("E",)),
    "layers/expert_gate": HfTensor(f"{_EXPERT}.gate_proj.weight", ("M", "D")),
    "layers/expert_in": HfTensor(f"{_EXPERT}.up_proj.weight", ("M", "D")),
    "layers/expert_out": HfTensor(f"{_EXPERT}.down_proj.weight", ("D", "M")),
    "layers/shared_gate": HfTensor(f"{_SHARED}.gate_proj.weight", ("U", "D")),
    "layers/shared_in": HfTensor(f"{_SHARED}.up_proj.weight", ("U", "D")),
    "layers/shared_out": HfTensor(f"{_SHARED}.down_proj.weight", ("D", "U")),
}
_SPARSE = f"{_LAYER}.block_sparse_moe"
_MIXTRAL = {
    "layers/router": HfTensor(f"{_SPARSE}.gate.weight", ("E", "D")),
    "layers/expert_gate": HfTensor(f"{_SPARSE}.experts.{{}}.w1.weight", ("M", "D")),
    "layers/expert_in": HfTensor(f"{_SPARSE}.experts.{{}}.w3.weight", ("M", "D")),
    "layers/expert_out": HfTensor(f"{_SPARSE}.experts.{{}}.w2.weight", ("D", "M")),
}
_GATE_UP = ("M", "M")
_GPT_OSS = {
    "layers/sinks": HfTensor(f"{_ATTENTION}.sinks", ("N",)),
    "layers/router": HfTensor(f"{_MLP}.router.weight", ("E", "D")),
    "layers/router_bias": HfTensor(f"{_MLP}.router.bias", ("E",)),
    **{
        f"layers/expert_{name}": HfTensor(
            f"{_MLP}.experts.gate_up_proj", ("E", "D", "M"), 2, _GATE_UP, index, "alternate"
        )
        for index, name in enumerate(("gate", "in"))
    },
    **{
        f"layers/expert_{name}_bias": HfTensor(
            f"{_MLP}.experts.gate_up_proj_bias", ("E", "M"), 1, _GATE_UP, index, "alternate"
        )
        for index, name in enumerate(("gate", "in"))
    },
    "layers/expert_out": HfTensor(f"{_MLP}.experts.down_proj", ("E", "M", "D")),
    "layers/expert_out_bias": HfTensor(f"{_MLP}.experts.down_proj_bias", ("E", "D")),
}
_SPARSE_OR_DENSE = f"{_LAYER}.feed_forward"
_LLAMA_4 = {
    **{
        path: replace(_LLAMA[path], pairs="H")
        for path in ("layers/wq", "layers/wk", "layers/wq_bias", "layers/wk_bias")
    },
    **{
        f"layers/{ours}_{name}": HfTensor(f"{_SPARSE_OR_DENSE}{theirs}.{hf}_proj.weight", (out, into))
        for ours, theirs, inner in (("w", "", "F"), ("shared", ".shared_expert", "U"))
        for name, hf, out, into in (
            ("gate", "gate", inner, "D"),
            ("in", "up", inner, "D"),
            ("out", "down", "D", inner),
        )
    },
    "layers/router": HfTensor(f"{_SPARSE_OR_DENSE}.router.weight", ("E", "D")),
    **{
        f"layers/expert_{name}": HfTensor(
            f"{_SPARSE_OR_DENSE}.experts.gate_up_proj", ("E", "D", "M"), 2, _GATE_UP, index
        )
        for index, name in enumerate(("gate", "in"))
    },
    "layers/expert_out": HfTensor(f"{_SPARSE_OR_DENSE}.experts.down_proj", ("E", "M", "D")),
}
_GPT_2_PREFIX = "transformer."
_H = "transformer.h.{}"
_GPT_2 = {
    "embed": HfTensor("transformer.wte.weight", ("V", "D")),
    "positions": HfTensor("transformer.wpe.weight", ("W", "D")),
    "layers/attention_norm": HfTensor(f"{_H}.ln_1.weight", ("D",)),
    "layers/attention_norm_bias": HfTensor(f"{_H}.ln_1.bias", ("D",)),
    **{
        f"layers/{name}": HfTensor(f"{_H}.attn.c_attn.weight", ("D", _QKV[index]), 1, _QKV, index)
        for index, name in enumerate(("wq", "wk", "wv"))
    },
    **{
        f"layers/{name}": HfTensor(f"{_H}.attn.c_attn.bias", (_QKV[index],), 0, _QKV, index)
        for index, name in enumerate(("wq_bias", "wk_bias", "wv_bias"))
    },
    "layers/wo": HfTensor(f"{_H}.attn.c_proj.weight", ("NH", "D")),
    "layers/wo_bias": HfTensor(f"{_H}.attn.c_proj.bias", ("D",)),
    "layers/mlp_norm": HfTensor(f"{_H}.ln_2.weight", ("D",)),
    "layers/mlp_norm_bias": HfTensor(f"{_H}.ln_2.bias", ("D",)),
    "layers/w_in": HfTensor(f"{_H}.mlp.c_fc.weight", ("D", "F")),
    "layers/w_in_bias": HfTensor(f"{_H}.mlp.c_fc.bias", ("F",)),
    "layers/w_out": HfTensor(f"{_H}.mlp.c_proj.weight", ("F", "D")),
    "layers/w_out_bias": HfTensor(f"{_H}.mlp.c_proj.bias", ("D",)),
    "final_norm": HfTensor("transformer.ln_f.weight", ("D",)),
    "final_norm_bias": HfTensor("transformer.ln_f.bias", ("D",)),
    "unembed": HfTensor(UNEMBED, ("V", "D")),
}
_MPT_LAYER = "transformer.blocks.{}"
_MPT = {
    "embed": HfTensor("transformer.wte.weight", ("V", "D")),
    "layers/attention_norm": HfTensor(f"{_MPT_LAYER}.norm_1.weight", ("D",)),
    **{
        f"layers/{name}": HfTensor(f"{_MPT_LAYER}.attn.Wqkv.weight", (_QKV[index], "D"), 0, _QKV, index)
        for index, name in enumerate(("wq", "wk", "wv"))
    },
    "layers/wo": HfTensor(f"{_MPT_LAYER}.attn.out_proj.weight", ("D", "NH")),
    "layers/mlp_norm": HfTensor(f"{_MPT_LAYER}.norm_2.weight", ("D",)),
    "layers/w_in": HfTensor(f"{_MPT_LAYER}.ffn.up_proj.weight", ("F", "D")),
    "layers/w_out": HfTensor(f"{_MPT_LAYER}.ffn.down_proj.weight", ("D", "F")),
    "final_norm": HfTensor("transformer.norm_f.weight", ("D",)),
    "unembed": HfTensor(UNEMBED, ("V", "D")),
}
# Of each head its query, key and value.
_BLOOM_QKV = f"{_H}.self_attention.query_key_value"
_BLOOM = {
    "embed": HfTensor("transformer.word_embeddings.weight", ("V", "D")),
    **{
        f"layers/{name}": HfTensor(f"{_BLOOM_QKV}.weight", (_QKV[index], "D"), 0, _QKV, index, "within")
        for index, name in enumerate(("wq", "wk", "wv"))
    },
    **{
        f"layers/{name}_bias": HfTensor(f"{_BLOOM_QKV}.bias", (_QKV[index],), 0, _QKV, index, "within")
        for index, name in enumerate(("wq", "wk", "wv"))
    },
    **{
        f"{ours}{suffix}": HfTensor(f"{theirs}.{kind}", dims[:count])
        for suffix, kind, count in (("", "weight", 2), ("_bias", "bias", 1))
        for ours, theirs, dims in (
            ("embed_norm", "transformer.word_embeddings_layernorm", ("D",)),
            ("layers/attention_norm", f"{_H}.input_layernorm", ("D",)),
            ("layers/wo", f"{_H}.self_attention.dense", ("D", "NH")),
            ("layers/mlp_norm", f"{_H}.post_attention_layernorm", ("D",)),
            ("layers/w_in", f"{_H}.mlp.dense_h_to_4h", ("F", "D")),
            ("layers/w_out", f"{_H}.mlp.dense_4h_to_h", ("D", "F")),
            ("final_norm", "transformer.ln_f", ("D",)),
        )
    },
    "unembed": HfTensor(UNEMBED, ("V", "D")),
}
