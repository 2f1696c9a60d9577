from meshwright.models.config import Unquantised
from meshwright.models.families.family import Family, Key, fixed
from meshwright.models.families.keys import ATTENTION_BIAS, LLAMA_KEYS
from meshwright.models.families.releases import Release, preset
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import LLAMA_CALLS

_LONG = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
_LLAMA_3 = {"num_kv_heads": 8, "vocab_size": 128_256, "rope_theta": 500_000.0}

FAMILY = Family(
    "llama",
    "LLaMA 1 to 3.3",
    ("LlamaForCausalLM",),
    model_types=("llama", "emu3_text_model", "internlm3", "iquestcoder"),
    wrappers=("emu3", "llava", "llava_next", "idefics3", "smolvlm"),
    keys=LLAMA_KEYS | ATTENTION_BIAS | {"mlp_bias": Key("mlp_bias", False)} | fixed(sliding_window=None),
    class_defaults={
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
    },
    groups=(Rope(),),
    tensors=LLAMA_TENSORS,
    tool_calls=LLAMA_CALLS,
    releases=(
        Release(
            "Touvron et al. 2023, https://arxiv.org/abs/2302.13971, table 2",
            {
                "llama-7b": preset("L=32, D=4096, F=11_008, N=32", 6_738_415_616),
                "llama-13b": preset("L=40, D=5120, F=13_824, N=40", 13_015_864_320),
                "llama-30b": preset("L=60, D=6656, F=17_920, N=52", 32_528_943_616),
                "llama-65b": preset("L=80, D=8192, F=22_016, N=64", 65_285_660_672),
            },
            shared={"vocab_size": 32_000, "max_seq_len": 2048, "norm_eps": 1e-6},
        ),
        Release(
            "Touvron et al. 2023, https://arxiv.org/abs/2307.09288; config.json of meta-llama/Llama-2-*-hf",
            {
                "llama-2-7b": preset("L=32, D=4096, F=11_008, N=32", 6_738_415_616),
                "llama-2-13b": preset("L=40, D=5120, F=13_824, N=40", 13_015_864_320),
                "llama-2-70b": preset("L=80, D=8192, F=28_672, N=64, K=8", 68_976_648_192),
            },
            shared={"vocab_size": 32_000, "max_seq_len": 4096},
        ),
        Release(
            "Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783; config.json of "
            "meta-llama/Meta-Llama-3-*",
            {
                "llama-3-8b": preset("L=32, D=4096, F=14_336, N=32", 8_030_261_248),
                "llama-3-70b": preset("L=80, D=8192, F=28_672, N=64", 70_553_706_496),
            },
            shared=_LLAMA_3 | {"max_seq_len": 8192},
        ),
        Release(
            "Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783; config.json of "
            "meta-llama/Llama-3.1-*, 3.3",
            {
                "llama-3.1-8b": preset("L=32, D=4096, F=14_336, N=32", 8_030_261_248),
                "llama-3.1-70b": preset("L=80, D=8192, F=28_672, N=64", 70_553_706_496),
                "llama-3.1-405b": preset("L=126, D=16_384, F=53_248, N=128", 405_853_388_800),
                "llama-3.3-70b": preset("L=80, D=8192, F=28_672, N=64", 70_553_706_496),
            },
            shared=_LLAMA_3 | {"max_seq_len": 131_072, "rope_scaling": _LONG | {"factor": 8.0}},
        ),
        Release(
            "Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, section 6.2: feed-forwards in fp8, "
            "except in the first and the last layer",
            {"llama-3.1-405b-fp8": preset("L=126, D=16_384, F=53_248, N=128", 405_853_388_800)},
            shared=_LLAMA_3
            | {"max_seq_len": 131_072, "rope_scaling": _LONG | {"factor": 8.0}, "stored_dtype": "fp8"}
            | {
                "unquantised": (
                    Unquantised("fp8", "embed", 1),
                    Unquantised("fp8", "unembed", 1),
                    *(Unquantised("fp8", f"layers/{name}", 126) for name in ("wq", "wk", "wv", "wo")),
                    *(Unquantised("fp8", f"layers/{name}", 2) for name in ("w_gate", "w_in", "w_out")),
                )
            },
        ),
        Release(
            "config.json of meta-llama/Llama-3.2-1B and 3B",
            {
                "llama-3.2-1b": preset("L=16, D=2048, F=8192, N=32", 1_235_814_400),
                "llama-3.2-3b": preset("L=28, D=3072, F=8192, N=24", 3_212_749_824),
            },
            shared=_LLAMA_3
            | {"max_seq_len": 131_072, "rope_scaling": _LONG | {"factor": 32.0}, "tied_embeddings": True},
        ),
        Release(
            # demo: five million parameters that a laptop trains in minutes; every dimension divides by 4.
            # tiny: for tests; its vocabulary holds a byte-level tokenizer.
            "meshwright",
            {
                "demo": preset("L=4, D=256, F=768, N=8, K=4, V=4096", max_seq_len=512),
                "tiny": preset("L=2, D=64, F=128, N=8, K=4, H=16, V=512", max_seq_len=128),
            },
        ),
        Release(
            "Allal et al. 2025, https://arxiv.org/abs/2502.02737; config.json of HuggingFaceTB/SmolLM2-*",
            {
                "smollm2-135m": preset("L=30, D=576, F=1536, N=9, K=3", 134_515_008),
                "smollm2-360m": preset("L=32, D=960, F=2560, N=15, K=5", 361_821_120),
                "smollm2-1.7b": preset("L=24, D=2048, F=8192, N=32", 1_711_376_384),
            },
            shared={
                "vocab_size": 49_152,
                "max_seq_len": 8192,
                "rope_theta": 100_000.0,
                "tied_embeddings": True,
            },
        ),
        Release(
            "config.json of TinyLlama/TinyLlama-1.1B-*, upstage/SOLAR-10.7B-v1.0, 01-ai/Yi-*",
            {
                "tinyllama-1.1b": preset(
                    "L=22, D=2048, F=5632, N=32, K=4, V=32_000", 1_100_048_384, max_seq_len=2048
                ),
                "solar-10.7b": preset(
                    "L=48, D=4096, F=14_336, N=32, K=8, V=32_000", 10_731_524_096, max_seq_len=4096
                ),
                "yi-6b": preset(
                    "L=32, D=4096, F=11_008, N=32, K=4, V=64_000",
                    6_061_035_520,
                    max_seq_len=4096,
                    rope_theta=5e6,
                ),
                "yi-34b": preset(
                    "L=60, D=7168, F=20_480, N=56, K=8, V=64_000",
                    34_388_917_248,
                    max_seq_len=4096,
                    rope_theta=5e6,
                ),
            },
        ),
        Release(
            "Roziere et al. 2023, https://arxiv.org/abs/2308.12950; config.json of codellama/CodeLlama-*",
            {
                "codellama-7b": preset("L=32, D=4096, F=11_008, N=32, V=32_016", 6_738_546_688),
                "codellama-34b": preset("L=48, D=8192, F=22_016, N=64, K=8, V=32_000", 33_743_970_304),
            },
            shared={"max_seq_len": 16_384, "rope_theta": 1e6},
        ),
    ),
)
