"""The tensors of Hugging Face checkpoints that hold our parameters.

HF stores a linear layer as [out, in] (GPT-2 as [in, out]) with its heads flattened, one tensor a layer;
ours keep every letter and stack the layers: q_proj[N·H, D] of layers 0..L-1 <-> wq[L, D, N, H].
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from meshwright.models.config import ModelConfig
from meshwright.models.parameters import parameters

UNEMBED = "lm_head.weight"


@dataclass(frozen=True)
class HfTensor:
    """Where a parameter is stored: the tensor's name, `{}` standing for its layer, and its letters.

    parts: where several parameters lie one after the other along `axis`, the letters of each there; ours
    is number `index` of them.
    """

    name: str
    dims: tuple[str, ...]
    axis: int = 0
    parts: tuple[str, ...] = ()
    index: int = 0

    @property
    def letters(self) -> str:
        return "".join(self.dims)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The parameter's own shape, as it is stored."""
        return tuple(_flat(dim, sizes) for dim in self.dims)

    def stored_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the tensor that holds it."""
        shape = list(self.shape(sizes))
        if self.parts:
            shape[self.axis] = sum(_flat(part, sizes) for part in self.parts)
        return tuple(shape)

    def starts(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Where in that tensor it begins, along each dimension."""
        before = sum(_flat(part, sizes) for part in self.parts[: self.index])
        return tuple(before if axis == self.axis else 0 for axis in range(len(self.dims)))


def _flat(dim: str, sizes: Mapping[str, int]) -> int:
    return prod(sizes[letter] for letter in dim)


def hf_tensors(config: ModelConfig, stored: Collection[str] = ()) -> dict[str, HfTensor]:
    """Where each parameter of `config` lies, in a checkpoint of these tensors or in one to be written."""
    if config.positions == "learned":
        named = dict(_GPT_2)
        if stored and not any(name.startswith(_GPT_2_PREFIX) for name in stored):
            named = {path: _renamed(tensor, _GPT_2_PREFIX, "") for path, tensor in named.items()}
    else:
        named = dict(_LLAMA) | (_GEMMA_2_NORMS if config.post_norms else {})
        if any(name.endswith("qkv_proj.weight") for name in stored):
            named |= _PHI_3_FUSED
    return {path: named[path] for path in parameters(config)}


def passed_over(name: str) -> bool:
    """Whether old exports store this besides: rotary frequencies, causal masks."""
    return name.endswith(("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))


def _renamed(tensor: HfTensor, old: str, new: str) -> HfTensor:
    name = new + tensor.name.removeprefix(old)
    return HfTensor(name, tensor.dims, tensor.axis, tensor.parts, tensor.index)


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
