from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.bamba import BAMBA_TENSORS
from meshwright.models.families.family import Family, Fixed, Key, Part, Tensor, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, FACTOR, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.state_layers import MAMBA_KEYS


class _GatedNorm:
    """Whether the mixer norms its values, and before or after their gate."""

    parts: Mapping[str, Part] = {
        "mamba_rms_norm": Part(("state_space",), (bool,)),
        "mamba_norm_before_gate": Part(("state_space",), (bool,)),
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        mixer, kind = fields["state_space"], "none"
        if given.get("mamba_rms_norm", False):
            kind = "after" if given.get("mamba_norm_before_gate", True) else "before"
        return {"state_space": replace(mixer, norm=kind)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        assert model.state_space is not None, "Falcon-H1 has a state space"
        width = model.state_space.num_heads * model.state_space.head_dim
        kind = model.state_space.norm
        return {
            "mamba_d_ssm": width,
            "mamba_rms_norm": kind != "none",
            "mamba_norm_before_gate": kind != "before",
        }


# The fields of a list of multipliers, in its order.
_LISTS = {"mlp_multipliers": ("mlp_gate", "mlp_out"), "ssm_multipliers": ("z", "x", "b", "c", "step")}


class _MultiplierLists:
    """Lists of multipliers; without them all are 1."""

    parts: Mapping[str, Part] = {key: Part(("multipliers",), (list,)) for key in _LISTS}

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        factors: dict[str, Any] = {}
        for key, names in _LISTS.items():
            if (listed := given.get(key)) is None:
                continue
            if len(listed) != len(names):
                raise ModelError(f"{name}: {key} has {len(listed)} numbers; fits: {len(names)}")
            factors |= dict(zip(names, listed, strict=True))
        return {"multipliers": replace(fields["multipliers"], **factors)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {key: [getattr(model.multipliers, one) for one in names] for key, names in _LISTS.items()}


def _multiplied(model: ModelConfig) -> Mapping[str, Tensor]:
    """The tensors whose parameters have factors. A bias is not multiplied by factors of the input."""
    m = model.multipliers
    if m is None:
        return {}
    factors = {
        "wq": m.attention_in,
        "wk": m.attention_in * m.key,
        "wk_bias": m.key,
        "wv": m.attention_in,
        "wo": m.attention_out,
        "wo_bias": m.attention_out,
        "w_gate": m.mlp_gate,
        "w_gate_bias": m.mlp_gate,
        "w_out": m.mlp_out,
        "w_out_bias": m.mlp_out,
        "state_gate": m.state_in * m.z,
        "state_gate_bias": m.z,
        "state_x": m.state_in * m.x,
        "state_x_bias": m.x,
        "state_b": m.state_in * m.b,
        "state_b_bias": m.b,
        "state_c": m.state_in * m.c,
        "state_c_bias": m.c,
        "state_step": m.state_in * m.step,
        "state_step_bias": m.step,
        "state_out": m.state_out,
        "state_out_bias": m.state_out,
    }
    return {
        name: replace(BAMBA_TENSORS[name], factor=factor) for name, factor in factors.items() if factor != 1
    }


FAMILY = Family(
    "falcon_h1",
    "Falcon-H1",
    ("FalconH1ForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | EPS_1E_5
    | MAMBA_KEYS
    | {
        "mlp_bias": Key("mlp_bias", False),
        "projectors_bias": Fixed((False,)),
        "embedding_multiplier": Key("embedding_scale", 1.0, form=FACTOR),
        "lm_head_multiplier": Key("logit_scale", 1.0, form=FACTOR),
        "attention_in_multiplier": Key("multipliers.attention_in", 1.0),
        "attention_out_multiplier": Key("multipliers.attention_out", 1.0),
        "key_multiplier": Key("multipliers.key", 1.0),
        "ssm_in_multiplier": Key("multipliers.state_in", 1.0),
        "ssm_out_multiplier": Key("multipliers.state_out", 1.0),
    }
    | ignored("follows from its heads", "mamba_d_ssm", "mamba_expand")
    | ignored("of layers that all have both mixers", "layers_block_type", "attn_layer_indices")
    | ignored(
        "how transformers runs it",
        "mamba_chunk_size", "mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep", "time_step_limit",
        "time_step_min", "time_step_max", "time_step_floor",
    ),
    sets={"mixers": ("both",)},
    groups=(_GatedNorm(), _MultiplierLists(), Rope(theta=10_000.0)),
    tensors=BAMBA_TENSORS,
    variants=_multiplied,
)  # fmt: skip
