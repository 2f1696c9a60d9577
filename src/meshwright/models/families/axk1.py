from meshwright.models.families.family import Family, Key, fixed, ignored, without
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LATENT, MTP, SIZES
from meshwright.models.families.layers import ExpertLayers
from meshwright.models.families.releases import mixture, preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LATENT_TENSORS, LAYER, LLAMA_TENSORS, experts, norms

FAMILY = Family(
    "axk1",
    "A.X K1",
    ("AXK1ForCausalLM",),
    keys=SIZES
    | LATENT
    | without(DEEPSEEK_EXPERTS, "first_k_dense_replace")
    | {
        "norm_topk_prob": Key("moe.normalized", True),
        "n_group": Key("moe.num_groups", 8),
        "topk_group": Key("moe.groups_per_token", 4),
        "routed_scaling_factor": Key("moe.scaling", 2.5),
    }
    | fixed(attention_bias=False, scoring_func="sigmoid", rope_interleave=True)
    | MTP
    | ignored("as its class computes it", "topk_method"),
    sets={"moe.score": "sigmoid", "moe.choice_bias": True, "moe.post_norm": True},
    groups=(ExpertLayers(), Rope()),
    tensors=LLAMA_TENSORS
    | LATENT_TENSORS
    | experts()
    | norms("mlp_post_norm", f"{LAYER}.post_mlp_layernorm"),
    more_layers=True,
    releases=release(
        "SK Telecom 2026; config.json of skt/A.X-K1",
        {
            "a.x-k1": preset(
                "L=61, D=7168, F=18_432, N=64, V=163_840",
                "519B",
                "33B",
                d_head=192,
                max_seq_len=131_072,
                norm_eps=1e-6,
                mla={"q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
                moe=mixture(
                    192,
                    8,
                    2048,
                    num_shared_experts=1,
                    num_dense_layers=1,
                    num_groups=8,
                    groups_per_token=4,
                    scaling=2.5,
                ),
            )
        },
    ),
)
