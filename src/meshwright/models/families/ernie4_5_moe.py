from meshwright.models.families.family import Family, Key, Tensor, fixed, ignored, needed
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS, MTP, ROUTER
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts, in_pairs

FAMILY = Family(
    "ernie4_5_moe",
    "ERNIE 4.5 (experts)",
    ("Ernie4_5_MoeForCausalLM",),
    keys=LLAMA_KEYS
    | EPS_1E_5
    | ROUTER
    | {
        "use_bias": Key(("qkv_bias", "attention_out_bias", "mlp_bias"), False),
        "tie_word_embeddings": Key("tied_embeddings", True),
        "moe_num_experts": needed("moe.num_experts", "num_experts"),
        "moe_k": needed("moe.experts_per_token", "num_experts_per_tok"),
        "moe_intermediate_size": needed("moe.d_ff"),
        "moe_num_shared_experts": Key("moe.num_shared_experts", 2),
        "moe_layer_start_index": Key("moe.num_dense_layers", 1),
        "moe_layer_interval": Key("moe.every", 1),
    }
    | fixed(moe_use_aux_free=True, moe_gate="topk")
    | ignored("the last layer in every release", "moe_layer_end_index")
    | ignored("keeps a sum from zero", "moe_norm_min")
    | ignored("training only", "moe_capacity")
    | MTP,
    sets={"moe.choice_bias": True},
    groups=(Rope(theta=500_000.0),),
    tensors=LLAMA_TENSORS
    | in_pairs(LLAMA_TENSORS, "wq", "wk", "wq_bias", "wk_bias")
    | experts()
    | {"router_choice_bias": Tensor(f"{LAYER}.mlp.moe_statics.e_score_correction_bias", ("", "E"))},
    more_layers=True,
)
