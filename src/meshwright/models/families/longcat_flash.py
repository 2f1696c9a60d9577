from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.models.config_tables import Variant
from meshwright.models.families.by_layer import ByLayer, matrix, vector
from meshwright.models.families.family import Family, Key, ignored, needed, without
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LATENT, LLAMA_KEYS, MTP, ROUTER


def _read(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Three blocks for each layer of the file: a dense layer, experts, and a dense layer.

    Experts read the input of the first dense feed-forward, without a norm of their own. Some of the experts
    return their input and have no weights: `experts_per_token` is the mean number of the others.
    """
    num_layers, moe, num_zero = 3 * fields["num_layers"], fields["moe"], given.get("zero_expert_num") or 0
    chosen = round(moe.experts_per_token * moe.num_experts / (moe.num_experts + num_zero))
    of_zero = (matrix("router_zero", "Dk", "D", k=num_zero), vector("router_zero_bias", "k", k=num_zero))
    values = (("pre_norms", False), ("extras", of_zero if num_zero else ()))
    return {
        "num_layers": num_layers,
        "mixers": ("attention", "none", "attention"),
        "feed_forwards": ("dense", "experts", "dense"),
        "moe": replace(moe, experts_per_token=max(1, chosen)),
        "variants": (Variant(tuple(range(1, num_layers, 3)), values),),
    }


_KEYS = without(LLAMA_KEYS, "num_hidden_layers", "intermediate_size", "head_dim")

FAMILY = Family(
    "longcat_flash",
    "LongCat-Flash",
    ("LongcatFlashForCausalLM", "LongcatCausalLM"),
    keys=_KEYS
    | LATENT
    | ATTENTION_BIAS
    | EPS_1E_5
    | MTP
    | ROUTER
    | {
        "num_layers": needed("num_layers", "num_hidden_layers"),
        "ffn_hidden_size": needed("d_ff", "intermediate_size"),
        "n_routed_experts": needed("moe.num_experts"),
        "moe_topk": needed("moe.experts_per_token", "num_experts_per_tok"),
        "expert_ffn_hidden_size": needed("moe.d_ff", "moe_intermediate_size"),
        "routed_scaling_factor": Key("moe.scaling", 6.0),
    }
    | ignored("planned only, and positions change no plan", "rope_parameters", "rope_theta", "rope_scaling")
    | ignored("planned only: how latents are scaled", "mla_scale_q_lora", "mla_scale_kv_lora")
    | ignored("planned only: of the router", "router_bias", "norm_topk_prob", "zero_expert_type")
    | ignored("its attention is latent", "attention_method"),
    sets={
        "moe.choice_bias": True,
        "moe.normalized": False,
        "planned_only": "experts next to a layer's second attention (LongCat-Flash)",
    },
    groups=(ByLayer(_read, {"zero_expert_num": ("extras",)}),),
    tensors={},
    is_written=False,
)
