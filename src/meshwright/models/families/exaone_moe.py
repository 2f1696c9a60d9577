from meshwright.models.families.family import Family, Key, Tensor, fixed, ignored, needed, without
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, EPS_1E_5, LLAMA_KEYS, MTP
from meshwright.models.families.layers import ExpertLayers, LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts

_OTHER_NAMES = ("n_routed_experts", "n_shared_experts", "first_k_dense_replace")

FAMILY = Family(
    "exaone_moe",
    "K-EXAONE",
    ("ExaoneMoeForCausalLM",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | without(DEEPSEEK_EXPERTS, *_OTHER_NAMES)
    | {
        "num_experts": needed("moe.num_experts"),
        "num_shared_experts": Key("moe.num_shared_experts", 1),
        "norm_topk_prob": Key("moe.normalized", True),
        "routed_scaling_factor": Key("moe.scaling", 2.5),
    }
    | fixed(scoring_func="sigmoid", topk_method="noaux_tc")
    | MTP
    | ignored("its list of layers counts", "sliding_window_pattern", "is_moe_layer"),
    sets={"qk_norm": True, "moe.score": "sigmoid", "moe.choice_bias": True},
    groups=(LocalLayers(window=4096, global_every=4, unturned=True), ExpertLayers(), Rope()),
    tensors=LLAMA_TENSORS
    | experts()
    | {"router_choice_bias": Tensor(f"{LAYER}.mlp.e_score_correction_bias", ("E",))},
    more_layers=True,
)
