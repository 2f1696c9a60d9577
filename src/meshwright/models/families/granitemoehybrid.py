from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Part, Tensor, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, MULTIPLIERS, ROUTER
from meshwright.models.families.rope import Rope
from meshwright.models.families.state_layers import MAMBA_KEYS, StateLayers, mamba_tensors
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, fused_experts

_MOE = f"{LAYER}.block_sparse_moe"


class _FeedForwards:
    """Experts and a shared feed-forward, which is the whole feed-forward if there are no experts."""

    parts: Mapping[str, Part] = {
        "shared_intermediate_size": Part(("moe.d_ff_shared", "d_ff"), (int,)),
        "num_local_experts": Part(("moe.num_experts",), (int,)),
        "position_embedding_type": Part(("positions",), (str,)),
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        width, num_experts = given.get("shared_intermediate_size", 1024), given.get("num_local_experts", 8)
        read: dict[str, Any] = {
            "positions": "rope" if given.get("position_embedding_type") == "rope" else "none"
        }
        mixers = fields.get("mixers") or ()
        read |= {} if "state" in mixers else {"mixers": None, "state_space": None}
        if not num_experts:
            return read | {"moe": None, "d_ff": width}
        moe = replace(
            fields["moe"],
            num_experts=num_experts,
            num_shared_experts=int(bool(width)),
            d_ff_shared=width or None,
        )
        return read | {"moe": moe}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        moe = model.moe
        written = {"position_embedding_type": "rope" if model.positions == "rope" else None}
        if moe is None:
            return written | {"shared_intermediate_size": model.d_ff, "num_local_experts": 0}
        return written | {
            "shared_intermediate_size": moe.d_ff_all_shared,
            "num_local_experts": moe.num_experts,
            "intermediate_size": moe.d_ff,
            "num_experts_per_tok": moe.experts_per_token,
        }


class _Experts:
    """The experts of a token and their width, which files without experts have too."""

    parts: Mapping[str, Part] = {"num_experts_per_tok": Part(("moe.experts_per_token",), (int,))}

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        from meshwright.models.config_tables import MoE

        chosen = given.get("num_experts_per_tok", 2)
        return {"moe": MoE(max(1, chosen), chosen, fields["d_ff"])} if chosen else {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


FAMILY = Family(
    "granitemoehybrid",
    "Granite 4",
    ("GraniteMoeHybridForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | MULTIPLIERS
    | MAMBA_KEYS
    | ROUTER
    | {
        "mamba_n_heads": Key("state_space.num_heads", 128),
        "mamba_d_state": Key("state_space.state_dim", 256),
        "mamba_d_head": Key("state_space.head_dim", 64),
    }
    | ignored(
        "how transformers runs it",
        "mamba_chunk_size", "time_step_limit", "time_step_min", "time_step_max", "time_step_floor",
        "init_method", "initializer_range", "normalization_function",
    )
    | ignored("follows from the heads of the state", "mamba_expand"),
    optional=("moe", "state_space"),
    groups=(
        StateLayers(state="mamba"),
        _Experts(),
        _FeedForwards(),
        Rope(),
    ),
    tensors=LLAMA_TENSORS
    | mamba_tensors(f"{LAYER}.mamba")
    | {"router": Tensor(f"{_MOE}.router.layer.weight", ("E", "D"))}
    | fused_experts(_MOE, "input_linear", "output_linear")
    | fused_experts(f"{LAYER}.shared_mlp", "input_linear", "output_linear", "U", "shared")
    | fused_experts(f"{LAYER}.shared_mlp", "input_linear", "output_linear", "F", "w"),
)  # fmt: skip
