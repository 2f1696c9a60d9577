from meshwright.models.families.cohere import COHERE_KEYS, COHERE_SETS, COHERE_TENSORS
from meshwright.models.families.family import Family, Fixed, Key, fixed, needed
from meshwright.models.families.keys import EXPERTS
from meshwright.models.families.layers import ExpertLayers, LocalLayers
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import experts

FAMILY = Family(
    "cohere2_moe",
    "Command (experts)",
    ("Cohere2MoeForCausalLM",),
    keys=COHERE_KEYS
    | EXPERTS
    | {
        "head_dim": Key("d_head", 128),
        "intermediate_size": needed(("d_ff", "moe.d_ff")),
        "num_experts": needed("moe.num_experts", "num_local_experts"),
        "expert_selection_fn": Key("moe.score", "softmax"),
        "shared_expert_combination_strategy": Fixed(("average", "sum")),
    }
    | fixed(num_shared_experts=0, norm_topk_prob=True, rms_norm_eps=None)
    | fixed(prefix_dense_intermediate_size=None, prefix_dense_sliding_window_pattern=1),
    sets=COHERE_SETS,
    groups=(
        LocalLayers(window=4096, global_every=4, pattern=("sliding_window_pattern",), unturned=True),
        ExpertLayers(dense=0),
        Rope(),
    ),
    tensors=COHERE_TENSORS | experts(),
)
