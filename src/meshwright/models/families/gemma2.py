from meshwright.models.families.family import Family
from meshwright.models.families.gemma_keys import GEMMA_2_KEYS, GEMMA_2_SETS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.releases import preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, POST_NORMS

FAMILY = Family(
    "gemma2",
    "Gemma 2",
    ("Gemma2ForCausalLM",),
    keys=GEMMA_2_KEYS,
    sets=GEMMA_2_SETS,
    class_defaults={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
    },
    groups=(LocalLayers(window=4096, global_every=2), Rope()),
    tensors=LLAMA_TENSORS | POST_NORMS,
    releases=release(
        "Gemma Team 2024, https://arxiv.org/abs/2408.00118; config.json of google/gemma-2-*",
        {
            "gemma-2-2b": preset("L=26, D=2304, F=9216, N=8, K=4, H=256", 2_614_341_888),
            "gemma-2-9b": preset("L=42, D=3584, F=14_336, N=16, K=8, H=256", 9_241_705_984),
            "gemma-2-27b": preset(
                "L=46, D=4608, F=36_864, N=32, K=16, H=128", 27_227_128_320, query_scale=144**-0.5
            ),
        },
        shared={
            "vocab_size": 256_000,
            "max_seq_len": 8192,
            "norm_eps": 1e-6,
            "tied_embeddings": True,
            "activation": "gelu",
            "sliding_window": 4096,
            "global_every": 2,
            "attention_softcap": 50.0,
            "logit_softcap": 30.0,
            "query_scale": 256**-0.5,
        },
    ),
)
