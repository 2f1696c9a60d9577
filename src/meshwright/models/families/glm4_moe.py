from meshwright.models.families.family import Family, Key, fixed, ignored
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, EPS_1E_5, LLAMA_KEYS, MTP
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, NEXT_LAYER, experts

FAMILY = Family(
    "glm4_moe",
    "GLM-4.5, 4.6",
    ("Glm4MoeForCausalLM",),
    model_types=("glm4_moe", "glm4v_moe_text"),
    wrappers=("glm4v_moe",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | DEEPSEEK_EXPERTS
    | {
        "attention_bias": Key("qkv_bias", False),
        "use_qk_norm": Key("qk_norm", False),
        "norm_topk_prob": Key("moe.normalized", True),
        "n_shared_experts": Key("moe.num_shared_experts", 1),
        "first_k_dense_replace": Key("moe.num_dense_layers", 1),
    }
    | fixed(scoring_func="sigmoid", topk_method="noaux_tc")
    | MTP
    | ignored("num_nextn_predict_layers counts", "num_mtp_layers"),
    sets={"moe.score": "sigmoid", "moe.choice_bias": True},
    groups=(Rope(share=0.5),),
    tensors=LLAMA_TENSORS | experts(),
    more_layers=True,
    drafts=NEXT_LAYER,
)
