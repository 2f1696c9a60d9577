from meshwright.models.families.family import Family, Fixed, Key, Tensor, fixed, ignored, needed
from meshwright.models.families.keys import EXPERTS, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, WIDE_QK_NORMS, experts

_MOE = f"{LAYER}.block_sparse_moe"

FAMILY = Family(
    "minimax_m2",
    "MiniMax-M2, M2.5",
    ("MiniMaxM2ForCausalLM",),
    keys=LLAMA_KEYS
    | EXPERTS
    | {
        "intermediate_size": needed(("d_ff", "moe.d_ff")),
        "head_dim": Key("d_head", 128),
        "use_qk_norm": Key("qk_norm", True),
        "num_local_experts": needed("moe.num_experts", "num_experts"),
        "use_routing_bias": Key("moe.choice_bias", True),
    }
    | {"attn_type_list": Fixed((1,), of_each=True)}
    | fixed(scoring_func="sigmoid", qk_norm_type="per_layer", shared_intermediate_size=0)
    | ignored(
        "of modules that predict further tokens", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"
    ),
    sets={"qk_norm_over": "width", "moe.score": "sigmoid"},
    groups=(Rope(theta=5e6, share=1.0),),
    tensors=LLAMA_TENSORS
    | WIDE_QK_NORMS
    | experts(_MOE, ("w1", "w3", "w2"))
    | {"router_choice_bias": Tensor(f"{_MOE}.e_score_correction_bias", ("E",))},
    more_layers=True,
)
