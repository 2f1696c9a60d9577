from meshwright.models.families.deepseek_v3 import FAMILY as V3
from meshwright.models.families.deepseek_v32 import INDEXER_KEYS, INDEXER_TENSORS, SPARSE_SETS
from meshwright.models.families.family import Family, Fixed, Key, Release, ignored, mixture, preset
from meshwright.models.families.rope import Rope

FAMILY = Family(
    "glm_moe_dsa",
    "GLM-5",
    ("GlmMoeDsaForCausalLM",),
    keys=dict(V3.keys)
    | INDEXER_KEYS
    | {
        "rms_norm_eps": Key("norm_eps", 1e-5),
        "first_k_dense_replace": Key("moe.num_dense_layers", 3),
        "index_topk_freq": Fixed((1,)),
        "indexer_types": Fixed((None, "full"), of_each=True),
        "indexer_rope_interleave": Fixed((True,)),
    }
    | ignored(
        "as its class computes it", "layer_types", "mlp_layer_types", "index_skip_topk_offset", "num_experts"
    ),
    sets={**V3.sets, **SPARSE_SETS},
    groups=(Rope(),),
    tensors={**V3.tensors, **INDEXER_TENSORS},
    more_layers=True,
    releases=(
        Release(
            # Without the module that predicts a second token.
            "config.json of zai-org/GLM-5",
            {
                "glm-5": preset(
                    "744B",
                    L=78,
                    D=6144,
                    F=12_288,
                    N=64,
                    V=154_880,
                    max_seq_len=202_752,
                    norm_eps=1e-5,
                    rope_theta=1e6,
                    moe=mixture(256, 8, 2048, num_shared_experts=1, num_dense_layers=3, scaling=2.5),
                    indexer={"num_heads": 32, "head_dim": 128, "top_k": 2048},
                )
            },
            shared={
                "d_head": 256,
                "mla": {"q_rank": 2048, "kv_rank": 512, "nope_dim": 192, "rope_dim": 64, "value_dim": 256},
            },
        ),
    ),
)
