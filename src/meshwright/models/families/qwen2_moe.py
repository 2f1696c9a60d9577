from meshwright.models.families.family import Family, Key, Tensor, fixed, needed
from meshwright.models.families.keys import LLAMA_KEYS, NO_LOCAL_LAYERS, ROUTER
from meshwright.models.families.releases import mixture, preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, experts
from meshwright.models.families.tool_formats import HERMES

FAMILY = Family(
    "qwen2_moe",
    "Qwen 1.5 and 2 MoE",
    ("Qwen2MoeForCausalLM",),
    keys=LLAMA_KEYS
    | NO_LOCAL_LAYERS
    | ROUTER
    | {
        "num_experts": needed("moe.num_experts", "num_local_experts"),
        "num_experts_per_tok": needed("moe.experts_per_token"),
    }
    | fixed(mlp_only_layers=[])
    | {
        "moe_intermediate_size": needed("moe.d_ff"),
        "shared_expert_intermediate_size": needed("moe.d_ff_shared"),
        "decoder_sparse_step": Key("moe.every", 1),
        "norm_topk_prob": Key("moe.normalized", False),
        "qkv_bias": Key("qkv_bias", True),
    },
    sets={"moe.num_shared_experts": 1, "moe.shared_gate": True},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS
    | experts(shared="shared_expert")
    | {"shared_router": Tensor(f"{LAYER}.mlp.shared_expert_gate.weight", ("", "D"))},
    tool_calls=HERMES,
    releases=release(
        "config.json of Qwen/Qwen1.5-MoE-A2.7B, Qwen/Qwen2-57B-A14B",
        {
            "qwen1.5-moe-a2.7b": preset(
                "L=24, D=2048, F=5632, N=16",
                14_315_784_192,
                max_seq_len=8192,
                moe=mixture(60, 4, 1408, d_ff_shared=5632, normalized=False),
            ),
            "qwen2-57b-a14b": preset(
                "L=28, D=3584, F=18_944, N=28, K=4",
                "57.4B",
                "14B",
                max_seq_len=131_072,
                moe=mixture(64, 8, 2560, d_ff_shared=20_480, normalized=False),
            ),
        },
        shared={"vocab_size": 151_936, "norm_eps": 1e-6, "rope_theta": 1e6, "qkv_bias": True},
    ),
)
