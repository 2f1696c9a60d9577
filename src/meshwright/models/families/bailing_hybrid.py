from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer, by_layer, matrix
from meshwright.models.families.family import Family, Fixed, Key, fixed, ignored, without
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LATENT, PLANNED_POSITIONS, SIZES
from meshwright.models.families.layers import ExpertLayers
from meshwright.models.mixers import GatedDelta


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    num_layers, heads = fields["num_layers"], given.get("linear_num_heads") or fields["num_heads"]
    width = given.get("linear_conv_kernel_dim") or given.get("short_conv_kernel_size") or 4
    size = given.get("linear_head_dim") or fields["mla"].value_dim
    every = given.get("layer_group_size") or 6
    kinds = given.get("layer_types") or [
        "linear_attention" if (n + 1) % every else "full_attention" for n in range(num_layers)
    ]
    attends = [kind != "linear_attention" for kind in kinds]
    layers = [{"extras": (matrix("head_gates", "DN", "D"),) if one else ()} for one in attends]
    delta = GatedDelta(heads, heads, size, size, width, wide_gate=True, wide_decay=True)
    return by_layer(layers) | {
        "delta": delta,
        "mixers": tuple("attention" if one else "state" for one in attends),
    }


_NOT_READ = ("moe_layer_freq", "first_k_dense_replace", "head_dim")

FAMILY = Family(
    "bailing_hybrid",
    "Ling 2.5, Ring 2.5",
    ("BailingHybridForCausalLM",),
    keys=without(SIZES | LATENT | DEEPSEEK_EXPERTS, *_NOT_READ)
    | PLANNED_POSITIONS
    | fixed(attention_bias=False, scoring_func="sigmoid", moe_router_activation_func="sigmoid")
    | {
        "n_routed_experts": Key("moe.num_experts", 512, also=("num_local_experts", "num_experts")),
        "n_shared_experts": Key("moe.num_shared_experts", 1, also=("num_shared_experts",)),
        "routed_scaling_factor": Key("moe.scaling", 2.5),
        "max_position_embeddings": Key("max_seq_len", 262_144, also=("model_max_length",)),
        "num_experts_per_tok": Key("moe.experts_per_token", 8, also=("num_experts_per_token",)),
        "n_group": Key("moe.num_groups", 8, also=("num_expert_group",)),
        "topk_group": Key("moe.groups_per_token", 4),
        "norm_topk_prob": Key("moe.normalized", True, also=("moe_renormalize",)),
        "num_nextn_predict_layers": Key("mtp_layers", 0, also=("num_mtp_layers",)),
        "topk_method": Fixed(("noaux_tc",)),
    }
    | ignored("planned only: of the decays", "kda_safe_gate", "kda_lower_bound")
    | ignored("follows from the parts of a head", "head_dim")
    | ignored("training only", "mtp_loss_scaling_factor"),
    sets={
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
        "planned_only": "delta attention with a decay for each element",
    },
    optional=("delta",),
    groups=(
        ExpertLayers(dense=2),
        ByLayer(
            _read,
            {
                "layer_types": ("mixers",),
                "layer_group_size": ("mixers",),
                "linear_num_heads": ("delta.num_value_heads",),
                "linear_head_dim": ("delta.key_dim",),
                "linear_conv_kernel_dim": ("delta.conv_width",),
                "short_conv_kernel_size": ("delta.conv_width",),
            },
        ),
    ),
    tensors={},
    is_written=False,
)
