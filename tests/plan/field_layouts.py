"""Layouts that the field has trained with, each with its source.

A row is a layout as its source describes it, in fields of a Layout. Where the source names a remat policy
that is not ours, the row has the nearest that recomputes more; where it leaves the policy open, the one
that recomputes least of those that fit. What the source does not say (ZeRO stage, dtypes of the optimizer)
is the default of the software that ran it.
"""

from dataclasses import dataclass, replace

from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.presets import load_model

# Dtypes of the parameters' states. Megatron-LM: bf16 weights, float32 gradients and master copy.
_MEGATRON = "weights_dtype=bf16,gradients_dtype=f32,master_weights=true"
_MEGATRON_FP16 = f"{_MEGATRON},matmul_dtype=f16"
# NeMo's performance recipes reduce gradients in bf16.
_NEMO = "weights_dtype=bf16,gradients_dtype=bf16,master_weights=true"
_NEMO_FP8 = f"{_NEMO},matmul_dtype=fp8"
_NEMO_FP4 = f"{_NEMO},matmul_dtype=fp4"
# PyTorch's FSDP and MaxText: float32 weights and moments, cast to bf16 before they are gathered.
_FLOAT32 = "weights_dtype=f32,gradients_dtype=f32"
_FLOAT32_FP8 = f"{_FLOAT32},matmul_dtype=fp8"


def _resized(preset: str, name: str, seq_len: int, **sizes: int) -> ModelConfig:
    """A model with the blocks of `preset` and other sizes."""
    return replace(load_model(preset), name=name, max_seq_len=seq_len, **sizes)


def _gpt(
    name: str, num_layers: int, d_model: int, num_heads: int, vocab_size: int, seq_len: int = 2048
) -> ModelConfig:
    """GPT-3's blocks: F = 4 D, and as many KV heads as query heads."""
    sizes = {"num_layers": num_layers, "d_model": d_model, "d_ff": 4 * d_model, "vocab_size": vocab_size}
    heads = {"num_heads": num_heads, "num_kv_heads": num_heads, "d_head": d_model // num_heads}
    return _resized("gpt-3-175b", name, seq_len, **sizes, **heads)


def _maxtext(name: str, num_layers: int, d_model: int, d_ff: int, num_heads: int) -> ModelConfig:
    """MaxText's default model, scaled by `global_parameter_scale`."""
    sizes = {"num_layers": num_layers, "d_model": d_model, "d_ff": d_ff, "vocab_size": 32_000}
    heads = {"num_heads": num_heads, "num_kv_heads": num_heads, "d_head": 128 if name != "22b" else 256}
    return _resized("llama-2-70b", f"maxtext-{name}", 2048, **sizes, **heads)


_BLOOM = replace(_gpt("bloom-176b", 70, 14_336, 112, 250_880), positions="alibi")
_GLM = replace(
    _gpt("glm-130b", 70, 12_288, 96, 150_528), d_ff=32_768, gated=True, positions="rope", tied_embeddings=True
)
_PALM = _resized(
    "gemma-2b",
    "palm-540b",
    2048,
    num_layers=118,
    d_model=18_432,
    d_ff=73_728,
    num_heads=48,
    num_kv_heads=1,
    d_head=256,
    vocab_size=256_000,
)
_NEMOTRON_340B = replace(
    _gpt("nemotron-4-340b", 96, 18_432, 96, 256_000, 4096),
    num_kv_heads=8,
    positions="rope",
    tied_embeddings=False,
    activation="relu2",
)


@dataclass(frozen=True)
class FieldLayout:
    """A layout that trained `model`.

    model: a preset or a config. layout, dtypes: fields as `Layout.parse` reads them. source: who used
    it, the year, and where it is written. slow: searched in `make nightly` only. software: that ran it,
    where that matters here.
    """

    name: str
    model: str | ModelConfig
    machine: str
    num_sequences: int
    seq_len: int
    fields: str
    dtypes: str
    source: str
    slow: bool = False
    software: str = "xla"

    @property
    def config(self) -> ModelConfig:
        """The model, its context as long as the sequences."""
        config = load_model(self.model) if isinstance(self.model, str) else self.model
        return replace(config, max_seq_len=max(config.max_seq_len, self.seq_len))

    @property
    def hardware(self) -> Hardware:
        return load(self.machine).running(self.software)

    @property
    def workload(self) -> Workload:
        return Workload(self.num_sequences, self.seq_len)

    @property
    def layout(self) -> Layout:
        return Layout.parse(f"{self.fields},{self.dtypes}")


_LLAMA_3 = "Meta, The Llama 3 Herd of Models, 2024, table 4"
_SC21 = "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021"
_KORTHIKANTI = (
    "Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, table 3"
)
_NEMO_24 = "NVIDIA, NeMo 24.07 performance summary, 2024"
_NEMO_H100 = "NVIDIA, NeMo, scripts/performance/recommended_model_configs/model_configs_h100.csv, 2025"
_DGXC = "NVIDIA, DGX Cloud benchmarking recipes v25.02, 2025"
_BRIDGE = "NVIDIA, Megatron-Bridge performance summary, 2025"
_LONG = "NVIDIA, NeMo 24.03 long sequence performance, 2024"
_TORCHTITAN = "PyTorch, torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, 2024"
_FOUNDRY = "MosaicML, llm-foundry, scripts/train/benchmarking/README.md, 2023"
_MAXTEXT_V5E = "Google, MaxText, configs/v5e, 2024"
_MAXTEXT_V5P = "Google, MaxText, configs/v5p, 2024"
_TRILLIUM = "Google, tpu-recipes, training/trillium, 2025"
_IRONWOOD = "Google, tpu-recipes, training/ironwood, 2025"

FIELD_LAYOUTS = (
    # 126 layers are 128 chunks of one, less the first and the last, which have the embedding and the head.
    FieldLayout(
        "llama-3-405b-8k-8192-gpus",
        "llama-3.1-405b",
        "h100:1024x8",
        2048,
        8192,
        "data=64,tensor=8,pipe=16,zero=2,sequence_parallel=true,microbatches=32,schedule=interleaved,interleave=8",
        _MEGATRON,
        f"{_LLAMA_3}, row 1; no recomputation, section 3.3.2",
        slow=True,
    ),
    FieldLayout(
        "llama-3-405b-8k-16384-gpus",
        "llama-3.1-405b",
        "h100:2048x8",
        2048,
        8192,
        "data=128,tensor=8,pipe=16,zero=2,sequence_parallel=true,microbatches=16,schedule=interleaved,interleave=8",
        _MEGATRON,
        f"{_LLAMA_3}, row 2; no recomputation, section 3.3.2",
    ),
    FieldLayout(
        "llama-3-405b-131k",
        "llama-3.1-405b",
        "h100:2048x8",
        128,
        131_072,
        "data=8,context=16,tensor=8,pipe=16,zero=2,zero_context=true,sequence_parallel=true,microbatches=16,"
        "schedule=interleaved,interleave=8",
        _MEGATRON,
        f"{_LLAMA_3}, row 3",
    ),
    FieldLayout(
        "deepseek-v3",
        "deepseek-v3",
        "h800:256x8",
        15_360,
        4096,
        "data=128,expert=64,pipe=16,zero=1,microbatches=120,schedule=dualpipe,remat=full",
        "weights_dtype=bf16,gradients_dtype=f32,master_weights=true,optimizer_dtype=bf16,matmul_dtype=fp8",
        "DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, sections 3.2 and 4.2",
        slow=True,
    ),
    FieldLayout(
        "megatron-gpt-76b",
        "megatron-gpt-76b",
        "a100-80gb:128x8",
        1792,
        2048,
        "data=32,tensor=8,pipe=4,microbatches=28,schedule=interleaved,interleave=3,remat=full",
        _MEGATRON_FP16,
        f"{_SC21}, table 1",
        slow=True,
    ),
    FieldLayout(
        "megatron-gpt-145b",
        "megatron-gpt-145b",
        "a100-80gb:192x8",
        2304,
        2048,
        "data=24,tensor=8,pipe=8,microbatches=48,schedule=interleaved,interleave=2,remat=full",
        _MEGATRON_FP16,
        f"{_SC21}, table 1",
        slow=True,
    ),
    FieldLayout(
        "megatron-gpt-530b",
        "megatron-gpt-530b",
        "a100-80gb:315x8",
        2520,
        2048,
        "data=9,tensor=8,pipe=35,microbatches=280,schedule=interleaved,interleave=3,remat=full",
        _MEGATRON_FP16,
        f"{_SC21}, table 1",
        slow=True,
    ),
    FieldLayout(
        "megatron-gpt-1t",
        "megatron-gpt-1t",
        "a100-80gb:384x8",
        3072,
        2048,
        "data=6,tensor=8,pipe=64,microbatches=512,schedule=1f1b,remat=full",
        _MEGATRON_FP16,
        f"{_SC21}, table 1",
        slow=True,
    ),
    FieldLayout(
        "gpt-3-175b-384-gpus",
        _gpt("gpt-175b", 96, 12_288, 96, 51_200),
        "a100-80gb:48x8",
        1536,
        2048,
        "data=4,tensor=8,pipe=12,microbatches=384,schedule=1f1b,remat=full",
        _MEGATRON_FP16,
        f"{_SC21}, table 2",
        slow=True,
    ),
    FieldLayout(
        "gpt-3-175b-zero-3",
        _gpt("gpt-175b", 96, 12_288, 96, 51_200),
        "a100-80gb:48x8",
        1536,
        2048,
        "fsdp=384,remat=full",
        "weights_dtype=bf16,gradients_dtype=bf16,master_weights=true,matmul_dtype=f16",
        f"{_SC21}, table 2 (DeepSpeed)",
        slow=True,
    ),
    FieldLayout(
        "megatron-gpt-22b",
        _gpt("gpt-22b", 48, 6144, 64, 51_200),
        "a100-80gb:1x8",
        4,
        2048,
        "tensor=8,sequence_parallel=true,remat=attention",
        _MEGATRON_FP16,
        _KORTHIKANTI,
    ),
    FieldLayout(
        "megatron-gpt-175b-selective",
        _gpt("gpt-175b", 96, 12_288, 96, 51_200),
        "a100-80gb:8x8",
        64,
        2048,
        "tensor=8,pipe=8,sequence_parallel=true,microbatches=64,schedule=interleaved,interleave=3,remat=attention",
        _MEGATRON_FP16,
        _KORTHIKANTI,
    ),
    FieldLayout(
        "megatron-gpt-530b-selective",
        "megatron-gpt-530b",
        "a100-80gb:35x8",
        280,
        2048,
        "tensor=8,pipe=35,sequence_parallel=true,microbatches=280,schedule=interleaved,interleave=3,remat=attention",
        _MEGATRON_FP16,
        _KORTHIKANTI,
    ),
    FieldLayout(
        "megatron-gpt-1t-selective",
        "megatron-gpt-1t",
        "a100-80gb:64x8",
        512,
        2048,
        "tensor=8,pipe=64,sequence_parallel=true,microbatches=512,schedule=1f1b,remat=attention",
        _MEGATRON_FP16,
        _KORTHIKANTI,
        slow=True,
    ),
    FieldLayout(
        "mt-nlg-530b",
        _gpt("mt-nlg-530b", 105, 20_480, 128, 50_257),
        "a100-80gb:280x8",
        1920,
        2048,
        "data=8,tensor=8,pipe=35,microbatches=240,schedule=1f1b,remat=full",
        _MEGATRON,
        "Smith et al., Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B, 2022, section 3.4",
        slow=True,
    ),
    FieldLayout(
        "bloom-176b",
        _BLOOM,
        "a100-80gb:48x8",
        2048,
        2048,
        "data=8,tensor=4,pipe=12,zero=1,microbatches=128,schedule=1f1b,remat=full",
        _MEGATRON,
        "BigScience, BLOOM, 2022, section 3.4 and table 3",
    ),
    FieldLayout(
        "opt-175b",
        replace(_gpt("opt-175b", 96, 12_288, 96, 50_272), activation="relu"),
        "a100-80gb:124x8",
        992,
        2048,
        "fsdp=124,tensor=8,remat=full",
        "weights_dtype=bf16,gradients_dtype=bf16,master_weights=true,matmul_dtype=f16",
        "Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022, section 2.4",
    ),
    FieldLayout(
        "glm-130b",
        _GLM,
        "a100-40gb:96x8",
        4224,
        2048,
        "data=24,tensor=4,pipe=8,zero=1,microbatches=176,schedule=1f1b,remat=full",
        _MEGATRON_FP16,
        "Zeng et al., GLM-130B, 2022, section 2.3",
        slow=True,
    ),
    FieldLayout(
        "palm-540b",
        _PALM,
        "2*v4p:12x16x16",
        2048,
        2048,
        "data=2,fsdp=256,kv_replicas=12,remat=full",
        _FLOAT32,
        "Chowdhery et al., PaLM, 2022, section 4",
    ),
    FieldLayout(
        "llama-65b-a100",
        _resized("llama-65b", "llama-65b-128k", 2048, vocab_size=128_000),
        "a100-80gb:16x8",
        2048,
        2048,
        "data=8,tensor=2,pipe=8,zero=1,microbatches=256,schedule=1f1b",
        _MEGATRON,
        "Hagemann et al., Efficient Parallelization Layouts for Large-Scale Distributed Model Training, 2023",
        slow=True,
    ),
    FieldLayout(
        "gpt-14b-zero-bubble",
        _gpt("gpt-14.6b", 46, 5120, 40, 50_304),
        "a100-80gb:2x8",
        64,
        1024,
        "pipe=16,microbatches=64,schedule=interleaved,interleave=3",
        _MEGATRON,
        "Qi et al., Zero Bubble Pipeline Parallelism, 2023, tables 3 and 4",
    ),
    FieldLayout(
        "llama-2-70b-nemo",
        "llama-2-70b",
        "h100:8x8",
        128,
        4096,
        "data=4,tensor=4,pipe=4,zero=1,sequence_parallel=true,microbatches=32,schedule=interleaved,interleave=20",
        _NEMO_FP8,
        _NEMO_24,
    ),
    FieldLayout(
        "llama-3-8b-nemo",
        "llama-3-8b",
        "h100:1x8",
        128,
        8192,
        "data=4,context=2,zero=1,zero_context=true,microbatches=32",
        _NEMO_FP8,
        _NEMO_24,
    ),
    FieldLayout(
        "llama-3-70b-nemo",
        "llama-3-70b",
        "h100:8x8",
        128,
        8192,
        "data=2,context=2,tensor=4,pipe=4,zero=1,zero_context=true,sequence_parallel=true,microbatches=64,"
        "schedule=interleaved,interleave=5",
        _NEMO,
        _NEMO_H100,
    ),
    FieldLayout(
        "llama-3.1-405b-nemo",
        "llama-3.1-405b",
        "h100:128x8",
        512,
        8192,
        "data=8,context=2,tensor=8,pipe=8,zero=1,zero_context=true,sequence_parallel=true,microbatches=64,"
        "schedule=interleaved,interleave=8",
        _NEMO_FP8,
        _NEMO_H100,
        slow=True,
    ),
    FieldLayout(
        "llama-3.1-405b-dgx-cloud",
        "llama-3.1-405b",
        "h100:288x8",
        1008,
        8192,
        "data=16,context=2,tensor=8,pipe=9,zero=1,zero_context=true,sequence_parallel=true,microbatches=63,"
        "schedule=interleaved,interleave=7",
        _NEMO,
        _DGXC,
        slow=True,
    ),
    FieldLayout(
        "gpt-3-175b-nemo",
        _gpt("gpt-175b", 96, 12_288, 96, 51_200),
        "h100:16x8",
        256,
        2048,
        "data=4,tensor=4,pipe=8,zero=1,sequence_parallel=true,microbatches=64,schedule=interleaved,interleave=6",
        _NEMO,
        _NEMO_H100,
        slow=True,
    ),
    FieldLayout(
        "nemotron-4-340b",
        _NEMOTRON_340B,
        "h100:16x8",
        32,
        4096,
        "data=2,tensor=8,pipe=8,zero=1,sequence_parallel=true,microbatches=16,schedule=interleaved,interleave=12,"
        "remat=attention",
        _NEMO,
        _DGXC,
    ),
    FieldLayout(
        "mixtral-8x7b-nemo",
        "mixtral-8x7b",
        "h100:8x8",
        256,
        4096,
        "data=16,expert=8,pipe=4,zero=1,microbatches=16,schedule=interleaved,interleave=8",
        _NEMO,
        _NEMO_H100,
        slow=True,
    ),
    FieldLayout(
        "mixtral-8x22b-65k",
        "mixtral-8x22b",
        "h100:32x8",
        256,
        65_536,
        "data=2,context=8,tensor=4,pipe=4,expert=8,zero=1,zero_context=true,sequence_parallel=true,"
        "microbatches=128,schedule=interleaved,interleave=14",
        _NEMO,
        _NEMO_H100,
    ),
    FieldLayout(
        "qwen3-235b-h100",
        "qwen3-235b-a22b",
        "h100:32x8",
        8192,
        4096,
        "data=16,tensor=2,expert=32,pipe=8,zero=1,sequence_parallel=true,microbatches=512,schedule=interleaved,"
        "interleave=4,remat=matmuls",
        _NEMO_FP8,
        _BRIDGE,
        slow=True,
    ),
    FieldLayout(
        "deepseek-v3-gb200",
        "deepseek-v3",
        "gb200-nvl72:256",
        4096,
        4096,
        "data=64,expert=64,pipe=4,zero=1,microbatches=64,schedule=interleaved,interleave=4,remat=full",
        _NEMO_FP8,
        _BRIDGE,
        slow=True,
    ),
    FieldLayout(
        "llama-3.1-405b-gb200",
        "llama-3.1-405b",
        "gb200-nvl72:256",
        1536,
        8192,
        "data=4,tensor=4,pipe=16,zero=1,sequence_parallel=true,microbatches=384,schedule=interleaved,interleave=8,remat=matmuls",
        _NEMO_FP4,
        _BRIDGE,
        slow=True,
    ),
    FieldLayout(
        "llama-3.1-70b-gb200",
        "llama-3.1-70b",
        "gb200-nvl72:64",
        256,
        8192,
        "data=8,tensor=2,pipe=4,zero=1,sequence_parallel=true,microbatches=32,schedule=interleaved,interleave=5",
        _NEMO_FP4,
        _BRIDGE,
    ),
    FieldLayout(
        "gpt-oss-120b-gb200",
        "gpt-oss-120b",
        "gb200-nvl72:64",
        1280,
        4096,
        "data=64,expert=64,zero=1,microbatches=5",
        _NEMO_FP8,
        _BRIDGE,
        slow=True,
        # Arrays as long as the rows of experts that there are; ours have room for the worst load.
        software="megatron-te",
    ),
    FieldLayout(
        "llama-2-7b-131k",
        "llama-2-7b",
        "h100:16x8",
        32,
        131_072,
        "data=8,context=4,tensor=4,zero=1,zero_context=true,sequence_parallel=true,microbatches=4",
        _NEMO_FP8,
        _LONG,
    ),
    FieldLayout(
        "llama-2-7b-1m",
        "llama-2-7b",
        "h100:128x8",
        4,
        1_048_576,
        "data=4,context=32,tensor=8,zero=1,zero_context=true,sequence_parallel=true",
        _NEMO_FP8,
        _LONG,
    ),
    FieldLayout(
        "llama-3.1-8b-torchtitan",
        "llama-3.1-8b",
        "h100:16x8",
        256,
        8192,
        "fsdp=128,remat=alternate",
        _FLOAT32,
        f"{_TORCHTITAN}, table 2",
    ),
    FieldLayout(
        "llama-3.1-70b-torchtitan",
        "llama-3.1-70b",
        "h100:32x8",
        512,
        8192,
        "fsdp=32,tensor=8,sequence_parallel=true,remat=full",
        _FLOAT32_FP8,
        f"{_TORCHTITAN}, table 4",
        slow=True,
    ),
    FieldLayout(
        "llama-3.1-405b-torchtitan",
        "llama-3.1-405b",
        "h100:64x8",
        256,
        8192,
        "fsdp=8,tensor=8,pipe=8,sequence_parallel=true,microbatches=32,schedule=interleaved,interleave=2,remat=full",
        _FLOAT32_FP8,
        f"{_TORCHTITAN}, table 5",
    ),
    FieldLayout(
        "mpt-70b",
        _gpt("mpt-70b", 80, 8192, 64, 50_368),
        "h100:8x8",
        2048,
        2048,
        "fsdp=64,microbatches=4,remat=full",
        _FLOAT32,
        _FOUNDRY,
    ),
    FieldLayout(
        "mpt-7b",
        _gpt("mpt-7b", 32, 4096, 32, 50_368),
        "h100:64x8",
        3072,
        2048,
        "fsdp=512",
        _FLOAT32,
        _FOUNDRY,
    ),
    FieldLayout(
        "llama-8b-nanotron",
        _resized("llama-3-8b", "llama-8b", 4096, num_kv_heads=32, vocab_size=131_072),
        "h100:16x8",
        256,
        4096,
        "data=16,tensor=8,microbatches=2,sequence_parallel=true",
        _MEGATRON,
        "Tazi et al., The Ultra-Scale Playbook, 2025, sweep of 16 nodes",
        slow=True,
    ),
    FieldLayout(
        "maxtext-16b-v5e",
        _maxtext("16b", 32, 4096, 28_672, 64),
        "v5e:16x16",
        1536,
        2048,
        "fsdp=256,remat=full",
        _FLOAT32,
        f"{_MAXTEXT_V5E}/16b.sh",
        slow=True,
    ),
    FieldLayout(
        "maxtext-64b-v5e",
        _maxtext("64b", 64, 8192, 28_672, 64),
        "4*v5e:16x16",
        2048,
        2048,
        "data=4,fsdp=256,remat=full",
        _FLOAT32,
        f"{_MAXTEXT_V5E}/64b.sh",
        slow=True,
    ),
    FieldLayout(
        "maxtext-128b-v5e",
        _maxtext("128b", 64, 8192, 57_344, 128),
        "v5e:16x16",
        256,
        2048,
        "fsdp=16,tensor=16,sequence_parallel=true,remat=matmuls,offload=true",
        _FLOAT32,
        f"{_MAXTEXT_V5E}/128b.sh",
    ),
    FieldLayout(
        "gpt-3-175b-v5e",
        "gpt-3-175b",
        "v5e:16x16",
        128,
        2048,
        "fsdp=16,tensor=16,sequence_parallel=true,remat=full",
        _FLOAT32,
        f"{_MAXTEXT_V5E}/gpt3_175b.sh",
        slow=True,
    ),
    FieldLayout(
        "llama-2-70b-v5e",
        "llama-2-70b",
        "v5e:16x16",
        512,
        2048,
        "fsdp=256,remat=full,offload=true",
        _FLOAT32,
        f"{_MAXTEXT_V5E}/llama2_70b.sh",
    ),
    FieldLayout(
        "maxtext-128b-v5p",
        _maxtext("128b", 64, 8192, 57_344, 128),
        "v5p:4x4x8",
        128,
        2048,
        "fsdp=16,tensor=8,sequence_parallel=true,remat=matmuls",
        _FLOAT32,
        f"{_MAXTEXT_V5P}/128b.sh",
        slow=True,
    ),
    FieldLayout(
        "maxtext-256b-v5p",
        _maxtext("256b", 64, 16_384, 57_344, 128),
        "v5p:8x8x8",
        512,
        2048,
        "fsdp=64,tensor=8,sequence_parallel=true,remat=matmuls",
        _FLOAT32,
        f"{_MAXTEXT_V5P}/256b.sh",
        slow=True,
    ),
    FieldLayout(
        "maxtext-1024b-v5p",
        _maxtext("1024b", 128, 16_384, 114_688, 256),
        "v5p:8x16x16",
        4096,
        2048,
        "fsdp=128,tensor=16,sequence_parallel=true,remat=full",
        _FLOAT32,
        f"{_MAXTEXT_V5P}/1024b.sh",
        slow=True,
    ),
    FieldLayout(
        "gpt-3-175b-v5p",
        "gpt-3-175b",
        "v5p:4x8x64",
        2048,
        2048,
        "data=4,fsdp=64,tensor=8,sequence_parallel=true,remat=matmuls",
        f"{_FLOAT32},matmul_dtype=int8",
        f"{_MAXTEXT_V5P}/gpt3_175b/v5p_4096.sh (MLPerf Training 4.0)",
    ),
    FieldLayout(
        "llama-2-70b-v5p",
        "llama-2-70b",
        "v5p:4x8x8",
        1024,
        4096,
        "fsdp=256,remat=full",
        _FLOAT32,
        f"{_MAXTEXT_V5P}/llama2_70b.sh",
        slow=True,
    ),
    FieldLayout(
        "llama-3.1-70b-v6e",
        "llama-3.1-70b",
        "v6e:16x16",
        1280,
        8192,
        "fsdp=256,remat=full,offload=true",
        _FLOAT32,
        f"{_TRILLIUM}/Llama3.1-70B-MaxText",
        slow=True,
    ),
    FieldLayout(
        "gemma-3-12b-v6e",
        "gemma-3-12b",
        "2*v6e:16x16",
        512,
        32_768,
        "data=2,fsdp=256,remat=full,offload=true",
        _FLOAT32,
        f"{_TRILLIUM}/Gemma3-12B-MaxText",
        slow=True,
    ),
    FieldLayout(
        "mixtral-8x7b-v6e",
        "mixtral-8x7b",
        "v6e:16x16",
        3072,
        4096,
        "fsdp=256,remat=full,offload=true",
        _FLOAT32,
        f"{_TRILLIUM}/Mixtral-8x7B-MaxText",
        slow=True,
    ),
    FieldLayout(
        "llama-3.1-70b-tpu7x",
        "llama-3.1-70b",
        "tpu7x:4x4x4",
        256,
        8192,
        "fsdp=64,remat=full",
        _FLOAT32,
        f"{_IRONWOOD}, llama3.1-70b, 4x4x4",
        slow=True,
    ),
    FieldLayout(
        "llama-3.1-70b-131k-tpu7x",
        "llama-3.1-70b",
        "tpu7x:4x8x8",
        64,
        131_072,
        "fsdp=32,context=8,zero_context=true,microbatches=2,remat=full",
        _FLOAT32,
        f"{_IRONWOOD}, llama3.1-70b, 131,072 tokens",
        slow=True,
    ),
    FieldLayout(
        "deepseek-v3-tpu7x",
        "deepseek-v3",
        "tpu7x:4x4x8",
        2048,
        4096,
        "fsdp=128,remat=full,offload=true",
        _FLOAT32,
        f"{_IRONWOOD}, deepseek3-671b",
        slow=True,
    ),
    # Long contexts on few chips, of which a search once found none.
    FieldLayout(
        "llama-3.1-70b-131k-h100",
        "llama-3.1-70b",
        "h100:4x8",
        4,
        131_072,
        "fsdp=4,context=8,zero_context=true,remat=full",
        "weights_dtype=bf16",
        "torchtitan's context parallelism (PyTorch, 2024): FSDP over data and context ranks alike",
    ),
    FieldLayout(
        "llama-3.1-8b-131k-v5e",
        "llama-3.1-8b",
        "v5e:4x4",
        1,
        131_072,
        "context=16,zero=3,zero_context=true,remat=full",
        "weights_dtype=bf16",
        "MaxText's context parallelism (Google, 2025): weights sharded over context ranks alike",
    ),
)
