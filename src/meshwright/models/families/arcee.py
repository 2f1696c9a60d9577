from meshwright.models.families.family import Family, Key
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS, activation
from meshwright.models.families.releases import published, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "arcee",
    "Arcee AFM",
    ("ArceeForCausalLM",),
    keys=LLAMA_KEYS | EPS_1E_5 | ATTENTION_BIAS | activation("relu2") | {"mlp_bias": Key("mlp_bias", False)},
    sets={"gated": False},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
    releases=release(
        "Arcee AI 2025; config.json of arcee-ai/AFM-4.5B",
        {
            "afm-4.5b": published(
                "L=36, D=2560, F=18_432, N=20, K=4, H=128, V=128_004",
                "4.6B",
                max_position_embeddings=65_536,
                rope_theta=10_000.0,
                rope_scaling={"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096},
            )
        },
    ),
)
