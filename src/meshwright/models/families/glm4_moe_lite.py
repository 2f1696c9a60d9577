from meshwright.models.families.family import Family, Key, fixed, without
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, EPS_1E_5, LATENT, MTP, SIZES
from meshwright.models.families.layers import ExpertLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LATENT_TENSORS, LLAMA_TENSORS, NEXT_LAYER, experts

FAMILY = Family(
    "glm4_moe_lite",
    "GLM-4.7-Flash",
    ("Glm4MoeLiteForCausalLM",),
    keys=SIZES
    | EPS_1E_5
    | LATENT
    | without(DEEPSEEK_EXPERTS, "first_k_dense_replace")
    | {
        "norm_topk_prob": Key("moe.normalized", True),
        "n_shared_experts": Key("moe.num_shared_experts", 1),
        "routed_scaling_factor": Key("moe.scaling", 1.8),
    }
    | fixed(attention_bias=False, scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    | fixed(partial_rotary_factor=1.0)
    | MTP,
    sets={"moe.score": "sigmoid", "moe.choice_bias": True},
    groups=(ExpertLayers(), Rope()),
    tensors=LLAMA_TENSORS | LATENT_TENSORS | experts(),
    more_layers=True,
    drafts=NEXT_LAYER,
)
