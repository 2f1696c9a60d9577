from meshwright.models.families.family import Family, fixed, ignored
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LATENT, SIZES
from meshwright.models.families.releases import by_letter, mixture, preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LATENT_TENSORS, LLAMA_TENSORS, experts

_LATENT = {"kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}

FAMILY = Family(
    "deepseek_v2",
    "DeepSeek-V2",
    ("DeepseekV2ForCausalLM",),
    keys=SIZES
    | LATENT
    | DEEPSEEK_EXPERTS
    # The weights of a token's experts are not normalized, even if norm_topk_prob is true.
    | fixed(attention_bias=False, scoring_func="softmax", norm_topk_prob=False)
    | ignored("follows from n_group", "topk_method")
    | ignored("its class has no such biases", "mlp_bias"),
    sets={"moe.normalized": False},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS | LATENT_TENSORS | experts(),
    releases=release(
        "DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434; config.json of deepseek-ai/DeepSeek-V2*",
        {
            "deepseek-v2-lite": preset(
                "L=27, D=2048, F=10_944, N=16",
                15_706_484_224,
                moe=mixture(64, 6, 1408, num_shared_experts=2, num_dense_layers=1),
                mla=_LATENT,
            ),
            "deepseek-v2": preset(
                "L=60, D=5120, F=12_288, N=128",
                235_741_434_880,
                "21B",
                moe=mixture(
                    160,
                    6,
                    1536,
                    num_shared_experts=2,
                    num_dense_layers=1,
                    num_groups=8,
                    groups_per_token=3,
                    scaling=16.0,
                ),
                mla=_LATENT | {"q_rank": 1536},
            ),
        },
        shared=by_letter("H=192, V=102_400")
        | {
            "max_seq_len": 163_840,
            "norm_eps": 1e-6,
            "rope_scaling": {
                "kind": "yarn",
                "factor": 40.0,
                "original_max_seq_len": 4096,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
    ),
)
