from meshwright.models.families.family import Family, Key, Tensor, fixed, needed
from meshwright.models.families.keys import EXPERTS
from meshwright.models.families.lfm2 import LFM2_KEYS, LFM2_LAYERS, LFM2_TENSORS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, feed_forward

_MLP = f"{LAYER}.feed_forward"

FAMILY = Family(
    "lfm2_moe",
    "LFM2-MoE",
    ("Lfm2MoeForCausalLM",),
    keys=LFM2_KEYS
    | EXPERTS
    | fixed(use_expert_bias=True)
    | {
        "intermediate_size": needed("d_ff"),
        "moe_intermediate_size": needed("moe.d_ff"),
        "num_dense_layers": Key("moe.num_dense_layers", 2),
        "norm_topk_prob": Key("moe.normalized", True),
        "routed_scaling_factor": Key("moe.scaling", 1.0),
    },
    sets={"qk_norm": True, "moe.score": "sigmoid", "moe.choice_bias": True},
    groups=(LFM2_LAYERS, Rope(theta=1e6)),
    tensors=LFM2_TENSORS
    | {
        "router": Tensor(f"{_MLP}.gate.weight", ("E", "D")),
        "router_choice_bias": Tensor(f"{_MLP}.expert_bias", ("E",)),
    }
    | feed_forward("expert", f"{_MLP}.experts.{{}}", "M", ("w1", "w3", "w2")),
)
