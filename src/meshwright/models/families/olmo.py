from meshwright.models.families.family import Family, Key, without
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS
from meshwright.models.families.releases import preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS

FAMILY = Family(
    "olmo",
    "OLMo",
    ("OlmoForCausalLM",),
    keys=without(LLAMA_KEYS, "rms_norm_eps") | ATTENTION_BIAS | {"clip_qkv": Key("clip_qkv")},
    sets={"norm": "layer", "norm_scale": False, "norm_eps": 1e-5},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
    releases=release(
        "Groeneveld et al. 2024, https://arxiv.org/abs/2402.00838; config.json of allenai/OLMo-*-hf",
        {
            "olmo-1b": preset("L=16, D=2048, F=8192, N=16", 1_176_764_416, tied_embeddings=True),
            "olmo-7b": preset("L=32, D=4096, F=11_008, N=32", 6_888_095_744),
        },
        shared={"vocab_size": 50_304, "max_seq_len": 2048},
    ),
)
