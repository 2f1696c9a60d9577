from meshwright.models.families.family import Family, Key, Tensor, ignored, needed, without
from meshwright.models.families.keys import LLAMA_KEYS, ROUTER
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts, norms

FAMILY = Family(
    "kolibri1",
    "Kolibri 1",
    ("Kolibri1ForCausalLM",),
    keys=without(LLAMA_KEYS, "intermediate_size")
    | ROUTER
    | {
        "head_dim": Key("d_head", 128),
        "num_local_experts": needed("moe.num_experts", "num_experts"),
        "num_experts_per_tok": needed("moe.experts_per_token"),
        "moe_intermediate_size": needed(("d_ff", "moe.d_ff")),
        "shared_expert_intermediate_size": needed("moe.d_ff_shared"),
        "norm_topk_prob": Key("moe.normalized", False),
    }
    | ignored("all layers have experts", "intermediate_size"),
    sets={
        "post_norms": True,
        "qk_norm": True,
        "moe.num_shared_experts": 1,
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
        "moe.chosen_by_logits": True,
    },
    groups=(LocalLayers(window=513, global_every=5, unturned=True), Rope()),
    tensors=LLAMA_TENSORS
    | norms("attention_post_norm", f"{LAYER}.post_attn_norm")
    | norms("mlp_post_norm", f"{LAYER}.post_ffn_norm")
    | experts()
    | {"router_choice_bias": Tensor(f"{LAYER}.moe.router.expert_bias", ("E",))},
)
