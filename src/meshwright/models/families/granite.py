from meshwright.models.families.family import Family, Key
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS, MULTIPLIERS
from meshwright.models.families.releases import by_letter, preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "granite",
    "Granite 3",
    ("GraniteForCausalLM",),
    model_types=("granite", "granite4_vision_text", "granite_docling_text"),
    keys=LLAMA_KEYS | ATTENTION_BIAS | MULTIPLIERS | {"mlp_bias": Key("mlp_bias", False)},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
    releases=release(
        "Granite Team 2024, Granite 3.0 Language Models; config.json of ibm-granite/granite-3.3-*-base",
        {
            "granite-3.3-2b": preset("L=40, D=2048, F=8192, N=32", query_scale=1 / 64, logit_scale=1 / 8),
            "granite-3.3-8b": preset("L=40, D=4096, F=12_800, N=32", query_scale=1 / 128, logit_scale=1 / 16),
        },
        shared=by_letter("K=8, V=49_152")
        | {
            "max_seq_len": 131_072,
            "rope_theta": 10_000_000.0,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "tied_embeddings": True,
        },
    ),
)
