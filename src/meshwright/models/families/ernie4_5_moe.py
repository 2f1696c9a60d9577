from meshwright.models.families.family import Family, Key, Tensor, fixed, ignored, needed
from meshwright.models.families.keys import EPS_1E_5, LLAMA_KEYS, MTP, ROUTER
from meshwright.models.families.releases import mixture, preset, release
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
    releases=release(
        "ERNIE Team 2025, ERNIE 4.5 Technical Report; config.json of baidu/ERNIE-4.5-*-PT",
        {
            "ernie-4.5-21b-a3b": preset(
                "L=28, D=2560, F=12_288, N=20, K=4",
                "21.8B",
                tied_embeddings=True,
                moe=mixture(64, 6, 1536, num_shared_experts=2, num_dense_layers=1),
            ),
            "ernie-4.5-300b-a47b": preset(
                "L=54, D=8192, F=28_672, N=64, K=8",
                "299B",
                "47B",
                moe=mixture(64, 8, 3584, num_dense_layers=3),
            ),
        },
        shared={"vocab_size": 103_424, "max_seq_len": 131_072, "rope_theta": 500_000.0},
    ),
)
