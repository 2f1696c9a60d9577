from meshwright.models.families.family import Family, Fixed, Key, fixed
from meshwright.models.families.keys import ATTENTION_BIAS, DEEPSEEK_EXPERTS, LLAMA_KEYS, NO_LOCAL_LAYERS
from meshwright.models.families.releases import mixture, preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, experts

FAMILY = Family(
    "dots1",
    "dots.llm1",
    ("Dots1ForCausalLM",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | NO_LOCAL_LAYERS
    | DEEPSEEK_EXPERTS
    | {"norm_topk_prob": Key("moe.normalized", False)}
    | fixed(topk_method="noaux_tc")
    | {"scoring_func": Fixed(("sigmoid", "noaux_tc"))},
    sets={"qk_norm": True, "moe.score": "sigmoid", "moe.choice_bias": True},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS | experts(),
    releases=release(
        "rednote-hilab 2025, https://arxiv.org/abs/2506.05767; config.json of dots.llm1.base",
        {
            "dots.llm1": preset(
                "L=62, D=4096, F=10_944, N=32, H=128, V=152_064",
                "143B",
                "14B",
                max_seq_len=32_768,
                rope_theta=10_000_000.0,
                moe=mixture(128, 6, 1408, num_shared_experts=2, num_dense_layers=1, scaling=2.5),
            )
        },
    ),
)
