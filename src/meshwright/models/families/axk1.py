from meshwright.models.families.family import Family, Key, fixed, ignored, without
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LATENT, MTP, SIZES
from meshwright.models.families.layers import ExpertLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LATENT_TENSORS, LAYER, LLAMA_TENSORS, experts, norms

FAMILY = Family(
    "axk1",
    "A.X K1",
    ("AXK1ForCausalLM",),
    keys=SIZES
    | LATENT
    | without(DEEPSEEK_EXPERTS, "first_k_dense_replace")
    | {
        "norm_topk_prob": Key("moe.normalized", True),
        "n_group": Key("moe.num_groups", 8),
        "topk_group": Key("moe.groups_per_token", 4),
        "routed_scaling_factor": Key("moe.scaling", 2.5),
    }
    | fixed(attention_bias=False, scoring_func="sigmoid", rope_interleave=True)
    | MTP
    | ignored("as its class computes it", "topk_method"),
    sets={"moe.score": "sigmoid", "moe.choice_bias": True, "moe.post_norm": True},
    groups=(ExpertLayers(), Rope()),
    tensors=LLAMA_TENSORS
    | LATENT_TENSORS
    | experts()
    | norms("mlp_post_norm", f"{LAYER}.post_mlp_layernorm"),
    more_layers=True,
)
