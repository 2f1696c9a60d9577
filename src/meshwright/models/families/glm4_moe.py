from meshwright.models.families.family import Family, Key, fixed, ignored
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, EPS_1E_5, LLAMA_KEYS, MTP
from meshwright.models.families.releases import by_letter, mixture, preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, NEXT_LAYER, experts

_GLM_4_5 = by_letter("L=92, D=5120, F=12_288") | {
    "qk_norm": True,
    "moe": mixture(160, 8, 1536, num_shared_experts=1, num_dense_layers=3, scaling=2.5),
}

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
    releases=release(
        # The report's 355B and 106B are without the vocabulary, and 355B with the module that predicts a
        # second token.
        "GLM-4.5 Team 2025, https://arxiv.org/abs/2508.06471; config.json of zai-org/GLM-4.5, 4.5-Air, 4.6",
        {
            "glm-4.5": preset(**_GLM_4_5, max_seq_len=131_072),
            "glm-4.5-air": preset(
                "L=46, D=4096, F=10_944",
                max_seq_len=131_072,
                moe=mixture(128, 8, 1408, num_shared_experts=1, num_dense_layers=1),
            ),
            "glm-4.6": preset(**_GLM_4_5, max_seq_len=202_752),
            "glm-4.7": preset(**_GLM_4_5, max_seq_len=202_752),
        },
        shared=by_letter("N=96, K=8, H=128, V=151_552")
        | {"rope_theta": 1e6, "rotary_dim": 64, "qkv_bias": True, "mtp_layers": 1},
    ),
)
