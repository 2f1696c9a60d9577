from collections.abc import Mapping
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.families.bamba import BAMBA_TENSORS
from meshwright.models.families.common import (
    ATTENTION_BIAS,
    EPS_1E_5,
    LLAMA_KEYS,
)
from meshwright.models.families.family import Family, Fixed, Key, Part, Release, Rule, ignored, preset
from meshwright.models.families.rope import Rope
from meshwright.models.families.state_layers import MAMBA_KEYS


class _GatedNorm:
    """Whether the mixer norms its values, and before or after their gate."""

    parts: Mapping[str, Part] = {
        "mamba_rms_norm": Part(("state_space",), (bool,)),
        "mamba_norm_before_gate": Part(("state_space",), (bool,)),
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        from dataclasses import replace

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


_MULTIPLIERS: dict[str, Rule] = ignored(
    "a multiplier, which is not run",
    "attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier",
    "lm_head_multiplier", "mlp_multipliers", "ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier",
)  # fmt: skip

FAMILY = Family(
    "falcon_h1",
    "Falcon-H1",
    ("FalconH1ForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | EPS_1E_5
    | MAMBA_KEYS
    | _MULTIPLIERS
    | {
        "mlp_bias": Key("mlp_bias", False),
        "projectors_bias": Fixed((False,)),
    }
    | ignored("follows from its heads", "mamba_d_ssm", "mamba_expand")
    | ignored("of layers that all have both mixers", "layers_block_type", "attn_layer_indices")
    | ignored(
        "how transformers runs it",
        "mamba_chunk_size", "mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep", "time_step_limit",
        "time_step_min", "time_step_max", "time_step_floor",
    ),
    sets={"mixers": ("both",), "planned_only": "the multipliers of Falcon-H1"},
    groups=(_GatedNorm(), Rope(theta=10_000.0)),
    tensors=BAMBA_TENSORS,
    releases=(
        Release(
            "config.json of tiiuae/Falcon-H1-34B-Base",
            {
                "falcon-h1-34b": preset(
                    "33.6B",
                    L=72,
                    D=5120,
                    F=21_504,
                    N=20,
                    K=4,
                    H=128,
                    V=261_120,
                    max_seq_len=262_144,
                    norm_eps=1e-5,
                    rope_theta=1e11,
                    state_space={
                        "num_heads": 32,
                        "head_dim": 128,
                        "state_dim": 256,
                        "num_groups": 2,
                        "norm": "none",
                    },
                )
            },
        ),
    ),
)  # fmt: skip
