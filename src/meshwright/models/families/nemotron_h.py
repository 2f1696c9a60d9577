from collections.abc import Mapping
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import (
    Family,
    Fixed,
    Key,
    Part,
    Rule,
    Tensor,
    fixed,
    ignored,
    needed,
    without,
)
from meshwright.models.families.keys import ACTIVATION, EXPERTS, SIZES
from meshwright.models.families.state_layers import ATTENTION_NAMES, STATE_NAMES, mamba_tensors
from meshwright.models.families.tensors import linear

_LAYER = "backbone.layers.{}"
_MIXER = f"{_LAYER}.mixer"
_LETTERS = {"M": STATE_NAMES[0], "*": ATTENTION_NAMES[0], "E": "moe", "-": "mlp"}


class _Blocks:
    """The blocks: each is a mixer or a feed-forward, in a list or a pattern of letters."""

    parts: Mapping[str, Part] = {
        "layers_block_type": Part(("mixers", "feed_forwards"), (list,)),
        "hybrid_override_pattern": Part(("mixers", "feed_forwards"), (str,)),
        "num_hidden_layers": Part(("num_layers",), (int,)),
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        kinds = given.get("layers_block_type")
        if kinds is None and (pattern := given.get("hybrid_override_pattern")):
            if unknown := {*pattern} - {*_LETTERS}:
                raise ModelError(f"{name}: hybrid_override_pattern has {min(unknown)!r}; fits: M, *, E, -")
            kinds = [_LETTERS[letter] for letter in pattern]
        if not kinds:
            raise ModelError(f"{name}: config.json lacks layers_block_type or hybrid_override_pattern")
        for kind in kinds:
            if kind not in (*ATTENTION_NAMES, *STATE_NAMES, "moe", "mlp"):
                raise ModelError(
                    f"{name}: layers_block_type has {kind!r}; fits: {', '.join(_LETTERS.values())}"
                )
        read = {
            "num_layers": len(kinds),
            "mixers": tuple(
                "attention" if kind in ATTENTION_NAMES else "state" if kind in STATE_NAMES else "none"
                for kind in kinds
            ),
            "feed_forwards": tuple({"moe": "experts", "mlp": "dense"}.get(kind, "none") for kind in kinds),
        }
        return read | ({} if "moe" in kinds else {"moe": None})

    def write(self, model: ModelConfig) -> dict[str, Any]:
        names = {"attention": ATTENTION_NAMES[0], "state": STATE_NAMES[0], "none": None}
        of_blocks = {"expert_blocks": "moe", "dense_blocks": "mlp"}
        kinds = [names[layer.kind.mixer] or of_blocks.get(layer.kind.stack) for layer in model.layers]
        return {"layers_block_type": kinds}


_KEYS: dict[str, Rule] = without(SIZES, "num_hidden_layers", "rms_norm_eps", "hidden_act")


def _experts(d: str) -> dict[str, Tensor]:
    """The tensors of experts that read and write elements of this letter."""
    return linear("expert_in", f"{_MIXER}.experts.{{}}.up_proj", "M", d) | linear(
        "expert_out", f"{_MIXER}.experts.{{}}.down_proj", d, "M"
    )


FAMILY = Family(
    "nemotron_h",
    "Nemotron-H, Nemotron 3",
    ("NemotronHForCausalLM",),
    keys=_KEYS
    | EXPERTS
    | {
        "num_local_experts": Key("moe.num_experts", 8, also=("n_routed_experts",)),
        "num_experts_per_tok": Key("moe.experts_per_token", 2),
        "head_dim": Key("d_head", 128, also=("attention_head_dim",)),
        "layer_norm_epsilon": Key("norm_eps", 1e-5, also=("norm_eps",)),
        "mlp_hidden_act": Key("activation", "relu2", form=ACTIVATION),
        "mlp_bias": Key("mlp_bias", False),
        "moe_intermediate_size": Key("moe.d_ff", 7688),
        "moe_shared_expert_intermediate_size": Key("moe.d_ff_shared", 7688),
        "n_shared_experts": Key("moe.num_shared_experts", 1),
        "n_group": Key("moe.num_groups", 1),
        "topk_group": Key("moe.groups_per_token", 1),
        "norm_topk_prob": Key("moe.normalized", True),
        "routed_scaling_factor": Key("moe.scaling", 1.0),
        "mamba_num_heads": needed("state_space.num_heads"),
        "mamba_head_dim": needed("state_space.head_dim"),
        "ssm_state_size": needed("state_space.state_dim"),
        "n_groups": Key("state_space.num_groups", 8, also=("mamba_n_groups",)),
        "conv_kernel": Key("state_space.conv_width", 4, also=("mamba_d_conv",)),
        "use_conv_bias": Key("state_space.conv_bias", True, also=("mamba_conv_bias",)),
        "use_bias": Key("state_space.proj_bias", False),
        "time_step_min": Key("state_space.min_step", 0.001, also=("mamba_dt_min",)),
        "sliding_window": Fixed((None,)),
        "moe_latent_size": Key("moe.latent"),
    }
    | fixed(attention_bias=False, mamba_proj_bias=False, mamba_hidden_act="silu")
    | ignored(
        "how transformers runs it",
        "chunk_size", "expand", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_logits_to_keep",
        "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_limit", "time_step_max",
        "use_mamba_kernels", "hidden_dropout", "rms_norm_eps", "time_step_rank",
    )
    | ignored("its attention has no positions", "rope_theta", "partial_rotary_factor", "rope_parameters")
    | ignored(
        "of the module that predicts a second token",
        "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
    ),
    sets={
        "positions": "none",
        "gated": False,
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
        "state_space.norm": "before",
    },
    optional=("moe",),
    groups=(_Blocks(),),
    tensors={
        "embed": Tensor("backbone.embeddings.weight", ("V", "D")),
        "attention_norm": Tensor(f"{_LAYER}.norm.weight", ("D",)),
        "mlp_norm": Tensor(f"{_LAYER}.norm.weight", ("D",)),
        "router": Tensor(f"{_MIXER}.gate.weight", ("E", "D")),
        "router_choice_bias": Tensor(f"{_MIXER}.gate.e_score_correction_bias", ("E",)),
        "final_norm": Tensor("backbone.norm_f.weight", ("D",)),
        "unembed": Tensor("lm_head.weight", ("V", "D")),
    }
    | linear("wq", f"{_MIXER}.q_proj", "NH", "D")
    | linear("wk", f"{_MIXER}.k_proj", "KH", "D")
    | linear("wv", f"{_MIXER}.v_proj", "KH", "D")
    | linear("wo", f"{_MIXER}.o_proj", "D", "NH")
    | mamba_tensors(_MIXER)
    | linear("w_in", f"{_MIXER}.up_proj", "F", "D")
    | linear("w_out", f"{_MIXER}.down_proj", "D", "F")
    | linear("latent_w_in", f"{_MIXER}.fc1_latent_proj", "m", "D")
    | linear("latent_w_out", f"{_MIXER}.fc2_latent_proj", "D", "m")
    | _experts("D")
    | linear("shared_in", f"{_MIXER}.shared_experts.up_proj", "U", "D")
    | linear("shared_out", f"{_MIXER}.shared_experts.down_proj", "D", "U"),
    variants=lambda model: _experts("m") if model.moe and model.moe.latent else {},
    more_layers=True,
)  # fmt: skip
