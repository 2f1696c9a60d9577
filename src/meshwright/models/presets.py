"""Published models by name, and `load_model`. Shapes are those of the models' own config.json."""

from pathlib import Path

from meshwright.errors import ModelError, nearest
from meshwright.models.config import ModelConfig, RopeScaling
from meshwright.models.files import read_model


def load_model(spec: str) -> ModelConfig:
    """The model that `spec` names: a preset, a config.json, a checkpoint folder, or a TOML.

    Raises ModelError for an unknown preset (naming the nearest) or a faulty file.

    >>> load_model("llama-3-70b").num_layers
    80
    """
    if spec.lower() in PRESETS:
        return PRESETS[spec.lower()]
    path = Path(spec)
    if path.exists() or path.suffix in (".json", ".toml"):
        return read_model(path)
    raise ModelError(f"model {spec!r} is no preset and no path; {nearest(spec.lower(), list(PRESETS))}")


def llama_2(
    size: str, num_layers: int, d_model: int, d_ff: int, num_heads: int, num_kv_heads: int
) -> ModelConfig:
    """LLaMA 2 (Touvron et al., 2023)."""
    return ModelConfig(
        name=f"llama-2-{size}",
        num_layers=num_layers,
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_head=128,
        vocab_size=32_000,
        max_seq_len=4096,
    )


def llama_3(
    name: str,
    num_layers: int,
    d_model: int,
    d_ff: int,
    num_heads: int,
    d_head: int = 128,
    max_seq_len: int = 8192,
    rope_factor: float | None = None,
    tied_embeddings: bool = False,
) -> ModelConfig:
    """LLaMA 3, 3.1, 3.2 and 3.3 (Grattafiori et al., 2024): 8 KV heads, 128,256 tokens.

    rope_factor: how far the frequencies are stretched from the first 8192 positions; None in LLaMA 3.
    """
    return ModelConfig(
        name=name,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        num_kv_heads=8,
        d_head=d_head,
        vocab_size=128_256,
        max_seq_len=max_seq_len,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(rope_factor, 1.0, 4.0, 8192) if rope_factor else None,
        tied_embeddings=tied_embeddings,
    )


def mistral_7b() -> ModelConfig:
    """Mistral 7B v0.3: no sliding window, 32,768 tokens."""
    return ModelConfig(
        name="mistral-7b",
        num_layers=32,
        d_model=4096,
        d_ff=14_336,
        num_heads=32,
        num_kv_heads=8,
        d_head=128,
        vocab_size=32_768,
        max_seq_len=32_768,
        rope_theta=1_000_000.0,
    )


def demo() -> ModelConfig:
    """Five million parameters that a laptop trains in minutes; every dimension divides by 4."""
    return ModelConfig(
        name="demo",
        num_layers=4,
        d_model=256,
        d_ff=768,
        num_heads=8,
        num_kv_heads=4,
        d_head=32,
        vocab_size=4096,
        max_seq_len=512,
    )


def tiny() -> ModelConfig:
    """For tests: the smallest model with every feature on, and room for a byte-level tokenizer."""
    return ModelConfig(
        name="tiny",
        num_layers=2,
        d_model=64,
        d_ff=128,
        num_heads=8,
        num_kv_heads=4,
        d_head=16,
        vocab_size=512,
        max_seq_len=128,
    )


_LONG = 131_072

PRESETS: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        llama_2("7b", 32, 4096, 11_008, 32, 32),
        llama_2("13b", 40, 5120, 13_824, 40, 40),
        llama_2("70b", 80, 8192, 28_672, 64, 8),
        llama_3("llama-3-8b", 32, 4096, 14_336, 32),
        llama_3("llama-3-70b", 80, 8192, 28_672, 64),
        llama_3("llama-3.1-8b", 32, 4096, 14_336, 32, max_seq_len=_LONG, rope_factor=8.0),
        llama_3("llama-3.1-70b", 80, 8192, 28_672, 64, max_seq_len=_LONG, rope_factor=8.0),
        llama_3("llama-3.1-405b", 126, 16_384, 53_248, 128, max_seq_len=_LONG, rope_factor=8.0),
        llama_3("llama-3.2-1b", 16, 2048, 8192, 32, 64, _LONG, rope_factor=32.0, tied_embeddings=True),
        llama_3("llama-3.2-3b", 28, 3072, 8192, 24, 128, _LONG, rope_factor=32.0, tied_embeddings=True),
        llama_3("llama-3.3-70b", 80, 8192, 28_672, 64, max_seq_len=_LONG, rope_factor=8.0),
        mistral_7b(),
        demo(),
        tiny(),
    )
}
