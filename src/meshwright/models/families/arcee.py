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
                "4.6B",
                hidden_size=2560,
                intermediate_size=18_432,
                num_hidden_layers=36,
                num_attention_heads=20,
                num_key_value_heads=4,
                head_dim=128,
                vocab_size=128_004,
                max_position_embeddings=65_536,
                rope_theta=10_000.0,
                rope_scaling={
                    "rope_type": "yarn",
                    "factor": 20.0,
                    "original_max_position_embeddings": 4096,
                },
            )
        },
    ),
)
