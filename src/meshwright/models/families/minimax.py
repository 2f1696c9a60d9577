from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Fixed, Part, Tensor, fixed, ignored, needed
from meshwright.models.families.keys import EPS_1E_5, EXPERTS, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.state_layers import StateLayers
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, feed_forward, fused, linear


class _Residuals:
    """Factors of the normed inputs that attention, a state and a feed-forward add to."""

    _names: ClassVar = tuple(
        (f"{new}_alpha_factor", f"layernorm_{old}_alpha")
        for new, old in (
            ("full_attn", "full_attention"),
            ("linear_attn", "linear_attention"),
            ("mlp", "mlp"),
        )
    )
    parts: Mapping[str, Part] = {
        name: Part(("residual_inputs",), (int, float)) for names in _names for name in names
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        read = (given.get(new, given.get(old, 1.0)) for new, old in self._names)
        return {"residual_inputs": tuple(map(float, read))}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {new: one for (new, _), one in zip(self._names, model.residual_inputs, strict=True)}


_QKV = ("state_q", "state_k", "state_v")
_ATTENTION, _MLP = f"{LAYER}.self_attn", f"{LAYER}.block_sparse_moe"

FAMILY = Family(
    "minimax",
    "MiniMax-01",
    ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    model_types=("minimax", "minimax_text_01", "minimax_m1"),
    wrappers=("minimax_vl_01",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | EXPERTS
    | {
        "intermediate_size": needed(("moe.d_ff", "d_ff")),
        "num_attention_heads": needed(("num_heads", "lightning.num_heads")),
        "head_dim": needed(("d_head", "lightning.head_dim")),
        "sliding_window": Fixed((None,)),
    }
    | fixed(full_attn_beta_factor=1.0, linear_attn_beta_factor=1.0, mlp_beta_factor=1.0)
    | fixed(layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0, layernorm_mlp_beta=1.0)
    | {"postnorm": Fixed((True,))}
    | ignored("follows from the heads", "rotary_dim")
    | {"shared_intermediate_size": Fixed((0,))}
    | ignored("of shared experts, which it lacks", "shared_moe_mode")
    | ignored("how transformers runs it", "block_size"),
    groups=(StateLayers(flags="attn_type_list"), _Residuals(), Rope(theta=1e6, share=1.0)),
    tensors=LLAMA_TENSORS
    | fused(_QKV, f"{_ATTENTION}.qkv_proj", ("gs", "gs", "gup"), arranged="within")
    | linear("state_gate", f"{_ATTENTION}.output_gate", "gup", "D")
    | {"state_norm": Tensor(f"{_ATTENTION}.norm.weight", ("gup",))}
    | linear("state_out", f"{_ATTENTION}.out_proj", "D", "gup")
    | {"router": Tensor(f"{_MLP}.gate.weight", ("E", "D"))}
    | feed_forward("expert", f"{_MLP}.experts.{{}}", "M", ("w1", "w3", "w2")),
)  # fmt: skip
