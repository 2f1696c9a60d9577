from collections.abc import Mapping
from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.families.by_layer import vector
from meshwright.models.families.family import (
    Family,
    Fixed,
    Key,
    Part,
    Tensor,
    fixed,
    ignored,
    needed,
    without,
)
from meshwright.models.families.keys import EPS_1E_5, LATENT, SIZES
from meshwright.models.families.state_layers import StateLayers
from meshwright.models.families.tensors import (
    LATENT_TENSORS,
    LAYER,
    LLAMA_TENSORS,
    PROJECTIONS,
    experts,
    feed_forward,
    linear,
)

_ATTENTION = f"{LAYER}.self_attn"
_CONVOLVED = ("gs", "gs", "gup")


# Queries of a layer's parts, and of the head, to the results of earlier blocks (attention residuals).
_ATTENTION_RESIDUALS = (
    *(vector(f"{part}_weigh", "D") for part in ("mixer", "feed_forward")),
    *(vector(f"{part}_weigh_norm", "D") for part in ("mixer", "feed_forward")),
    vector("head_weigh", "D", in_layers=False),
    vector("head_weigh_norm", "D", in_layers=False),
)


class _LinearAttention:
    """The table of older files with the sizes of delta attention, and the numbers of its layers from 1."""

    parts: Mapping[str, Part] = {
        "attn_res_block_size": Part(("extras",), (int,)),
        "linear_attn_config": Part(("delta", "mixers"), (dict,)),
        "linear_num_heads": Part(("delta",), (int,)),
        "linear_head_dim": Part(("delta",), (int,)),
        "linear_conv_kernel_dim": Part(("delta",), (int,)),
        "mlp_layer_types": Part(("moe",), (list,)),
    }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        from meshwright.models.mixers import GatedDelta

        table = given.get("linear_attn_config") or {}
        heads = table.get("num_heads", given.get("linear_num_heads", 32))
        size = table.get("head_dim", given.get("linear_head_dim", 128))
        width = table.get("short_conv_kernel_size", given.get("linear_conv_kernel_dim", 4))
        wide_gate = bool(table.get("use_full_rank_gate", False))
        delta = GatedDelta(heads, heads, size, size, width, rank=size, wide_gate=wide_gate)
        read: dict[str, Any] = {"delta": delta}
        # Bounded decays, its activation and attention residuals are planned only.
        if given.get("attn_res_block_size"):
            read |= {"extras": _ATTENTION_RESIDUALS, "planned_only": "attention residuals (Kimi K3)"}
        elif table.get("gate_lower_bound") is not None:
            read["planned_only"] = "decays with a bound"
        elif given.get("hidden_act") == "situ":
            read["planned_only"] = "its activation (SiTU)"
        if "layer_types" not in given and (attending := table.get("full_attn_layers")):
            layers = range(1, fields["num_layers"] + 1)
            read["mixers"] = tuple("attention" if n in attending else "state" for n in layers)
        elif "layer_types" not in given:
            layers = range(fields["num_layers"])
            read["mixers"] = tuple("attention" if n and n % 4 == 0 else "state" for n in layers)
        return read

    def write(self, model: ModelConfig) -> dict[str, Any]:
        delta = model.delta
        assert delta is not None, "Kimi Linear has delta attention"
        return {
            "linear_num_heads": delta.num_value_heads,
            "linear_head_dim": delta.key_dim,
            "linear_conv_kernel_dim": delta.conv_width,
        }


FAMILY = Family(
    "kimi_linear",
    "Kimi Linear, Kimi K3",
    ("KimiLinearForCausalLM",),
    wrappers=("kimi_k3",),
    keys=without(SIZES, "max_position_embeddings")
    | EPS_1E_5
    | LATENT
    | {
        "max_position_embeddings": Key("max_seq_len", 1_048_576, also=("model_max_length",)),
        "num_experts": needed("moe.num_experts", "num_local_experts", "n_routed_experts"),
        "num_experts_per_tok": Key("moe.experts_per_token", 8, also=("num_experts_per_token",)),
        "moe_intermediate_size": needed("moe.d_ff"),
        "n_shared_experts": Key("moe.num_shared_experts", 1, also=("num_shared_experts",)),
        "first_k_dense_replace": Key("moe.num_dense_layers", 1),
        "n_group": Key("moe.num_groups", 1, also=("num_expert_group",)),
        "topk_group": Key("moe.groups_per_token", 1),
        "routed_scaling_factor": Key("moe.scaling", 2.446),
        "norm_topk_prob": Key("moe.normalized", True, also=("moe_renormalize",)),
        "moe_router_activation_func": Fixed(("sigmoid",)),
        "moe_layer_freq": Fixed((1,)),
        "num_nextn_predict_layers": Fixed((0,)),
        "mla_use_nope": Fixed((True,)),
        "mla_use_output_gate": Key("attention_gate", False),
        "routed_expert_hidden_size": Key("moe.latent"),
        "latent_moe_use_norm": Key("moe.latent_norm", False),
        "hidden_act": Fixed(("silu", "situ")),
        "topk_method": Fixed(("noaux_tc",)),
    }
    | fixed(attention_bias=False)
    | ignored("planned only: its activation", "activation_situ_beta", "activation_situ_linear_beta")
    | ignored("training only", "output_router_logits")
    | ignored("how it chooses experts", "use_grouped_topk")
    | ignored("its attention has no positions", "rope_theta", "rope_scaling", "rope_parameters"),
    sets={"positions": "none", "moe.score": "sigmoid", "moe.choice_bias": True},
    optional=("delta",),
    groups=(StateLayers(), _LinearAttention()),
    tensors=LLAMA_TENSORS
    | LATENT_TENSORS
    | experts(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2"))
    | feed_forward("shared", f"{LAYER}.block_sparse_moe.shared_experts", "U", PROJECTIONS)
    | {
        f"conv_{part}": Tensor(f"{_ATTENTION}.{part}_conv1d.weight", (letters, "", "c"))
        for part, letters in zip("qkv", _CONVOLVED, strict=True)
    }
    | linear("state_q", f"{_ATTENTION}.q_proj", "gs", "D")
    | linear("state_k", f"{_ATTENTION}.k_proj", "gs", "D")
    | linear("state_v", f"{_ATTENTION}.v_proj", "gup", "D")
    | linear("state_beta", f"{_ATTENTION}.b_proj", "gu", "D")
    | linear("state_decay_down", f"{_ATTENTION}.f_a_proj", "r", "D")
    | linear("state_decay_up", f"{_ATTENTION}.f_b_proj", "gus", "r")
    | linear("state_gate_down", f"{_ATTENTION}.g_a_proj", "r", "D")
    | linear("state_gate_up", f"{_ATTENTION}.g_b_proj", "gup", "r")
    | {
        "decay_log": Tensor(f"{_ATTENTION}.A_log", ("", "", "gu", "")),
        "decay_bias": Tensor(f"{_ATTENTION}.dt_bias", ("gus",)),
        "state_norm": Tensor(f"{_ATTENTION}.o_norm.weight", ("p",)),
    }
    | linear("state_out", f"{_ATTENTION}.o_proj", "D", "gup"),
)
