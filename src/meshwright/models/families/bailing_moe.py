from collections.abc import Mapping
from typing import Any

from meshwright.models.families.by_layer import ByLayer
from meshwright.models.families.family import Family, Fixed, Key, Tensor, fixed, ignored, needed, without
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LLAMA_KEYS, MTP
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import (
    HEAD,
    LAYER,
    PROJECTIONS,
    QKV,
    experts,
    feed_forward,
    fused,
    linear,
    norms,
)

_ATTENTION = f"{LAYER}.attention"
_EXPERTS = ("n_routed_experts", "n_shared_experts")


def _head(given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"planned_only": "a head of normed weights (Ling)"} if given.get("norm_head") else {}


FAMILY = Family(
    "bailing_moe",
    "Ling, Ring 1, 1.5, 2.0",
    ("BailingMoeV2ForCausalLM", "BailingMoeForCausalLM"),
    model_types=("bailing_moe", "bailing_moe_v2"),
    keys=LLAMA_KEYS
    | without(DEEPSEEK_EXPERTS, *_EXPERTS)
    | MTP
    | {
        "num_experts": needed("moe.num_experts"),
        "num_shared_experts": Key("moe.num_shared_experts", 0),
        "moe_shared_expert_intermediate_size": Key("moe.d_ff_shared"),
        "norm_topk_prob": Key("moe.normalized", True),
        "use_bias": Key(("attention_out_bias", "mlp_bias"), False),
        "use_qkv_bias": Key("qkv_bias", False),
        "use_qk_norm": Key("qk_norm", False),
        "score_function": Key("moe.score", "softmax"),
        "moe_router_enable_expert_bias": Key("moe.choice_bias", False),
    }
    | fixed(use_rmsnorm=True, moe_router_enable_shared_expert=True, norm_softmax=False, multi_gate=False)
    | {"use_sliding_window": Fixed((False,))}
    | ignored("counts only with use_sliding_window", "sliding_window", "max_window_layers")
    | ignored("training only", "embedding_dropout", "output_dropout", "mtp_loss_scaling_factor")
    | ignored("how transformers runs it", "router_dtype"),
    groups=(Rope(share=1.0), ByLayer(_head, {"norm_head": ("planned_only",)})),
    tensors={
        "embed": Tensor("model.word_embeddings.weight", ("V", "D")),
        **norms("attention_norm", f"{LAYER}.input_layernorm"),
        **fused(("wq", "wk", "wv"), f"{_ATTENTION}.query_key_value", QKV),
        **linear("wo", f"{_ATTENTION}.dense", "D", "NH"),
        **norms("q_norm", f"{_ATTENTION}.query_layernorm", "H"),
        **norms("k_norm", f"{_ATTENTION}.key_layernorm", "H"),
        **norms("mlp_norm", f"{LAYER}.post_attention_layernorm"),
        **feed_forward("w", f"{LAYER}.mlp", "F", PROJECTIONS),
        **experts(),
        "router_choice_bias": Tensor(f"{LAYER}.mlp.gate.expert_bias", ("E",)),
        **norms("final_norm", "model.norm"),
        **HEAD,
    },
    more_layers=True,
    is_written=False,
)
