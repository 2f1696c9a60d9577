from meshwright.models.families.family import Family
from meshwright.models.families.keys import LLAMA_KEYS
from meshwright.models.families.layers import LocalLayers
from meshwright.models.families.releases import preset, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import MISTRAL_CALLS

FAMILY = Family(
    "mistral",
    "Mistral",
    ("MistralForCausalLM",),
    wrappers=("mistral3",),
    keys=LLAMA_KEYS,
    class_defaults={
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "max_position_embeddings": 131_072,
    },
    groups=(LocalLayers(window=4096), Rope()),
    tensors=LLAMA_TENSORS,
    tool_calls=MISTRAL_CALLS,
    releases=release(
        # mistral-7b is version 0.3, which has no sliding window.
        "Jiang et al. 2023, https://arxiv.org/abs/2310.06825; config.json of mistralai/*",
        {
            "mistral-7b": preset(
                "L=32, D=4096, F=14_336, N=32, V=32_768", 7_248_023_552, max_seq_len=32_768, rope_theta=1e6
            ),
            "mistral-7b-v0.1": preset(
                "L=32, D=4096, F=14_336, N=32, V=32_000",
                7_241_732_096,
                max_seq_len=32_768,
                sliding_window=4096,
            ),
            "mistral-nemo-12b": preset(
                "L=40, D=5120, F=14_336, N=32, V=131_072", 12_247_782_400, max_seq_len=131_072, rope_theta=1e6
            ),
            "mistral-small-24b": preset(
                "L=40, D=5120, F=32_768, N=32, V=131_072", 23_572_403_200, max_seq_len=32_768, rope_theta=1e8
            ),
            # Mistral Small 3.1 and 3.2, Magistral Small and Devstral Small, without their tower.
            "mistral-small-3.1-24b": preset(
                "L=40, D=5120, F=32_768, N=32, V=131_072", 23_572_403_200, max_seq_len=131_072, rope_theta=1e9
            ),
            "mistral-large": preset(
                "L=88, D=12_288, F=28_672, N=96, V=32_768",
                122_610_069_504,
                max_seq_len=131_072,
                rope_theta=1e6,
            ),
        },
        shared={"num_kv_heads": 8, "d_head": 128},
    ),
)
