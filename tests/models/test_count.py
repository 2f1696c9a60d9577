"""Counts against published figures, closed forms, and Hugging Face's own models."""

from dataclasses import replace

import pytest

from meshwright.models.config import ModelConfig
from meshwright.models.count import (
    count_params,
    forward_flops_per_token,
    kv_bytes_per_token,
    train_flops_per_token,
)
from meshwright.models.hf import to_hf
from meshwright.models.presets import PRESETS, demo

# As the model cards and transformers' num_parameters() state them.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str) -> None:
    count = count_params(PRESETS[name])
    assert (count.total, count.active) == (PUBLISHED[name], PUBLISHED[name])


def test_every_published_preset_is_counted() -> None:
    assert set(PUBLISHED) == set(PRESETS) - {"demo", "tiny"}


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_counts_the_same(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf(PRESETS[name])))
    assert count_params(PRESETS[name]).total == model.num_parameters()


def test_llama_2_13b_by_component() -> None:
    """13.0e9 = 8.5 MLP + 4.2 attention + 0.33 vocabulary, in billions."""
    count = count_params(PRESETS["llama-2-13b"])
    assert [round(part / 1e9, 2) for part in (count.mlp, count.attention, count.vocab)] == [8.49, 4.19, 0.33]
    assert round(count.total / 1e9, 1) == 13.0


CHECKED = ModelConfig("checked", 64, 4096, 16_384, 32, 32, 128, 32_000, 8192)


def test_the_checked_transformer() -> None:
    """D = 4096, F = 4D, V = 32,000, L = 64, MHA: attention is 1/4 and the cache 512 KiB a token in int8.

    The source prints 16e9 parameters: 17.4e9 are 16 binary billions (2^30), as are its 512 KiB.
    """
    count = count_params(CHECKED)
    assert count.total == 64 * (3 * 4096 * 16_384 + 4 * 4096**2 + 2 * 4096) + 2 * 4096 * 32_000 + 4096
    assert round(count.total / 2**30) == 16
    assert count.attention / (count.mlp + count.attention) == 1 / 4
    assert kv_bytes_per_token(CHECKED, "int8") == 512 * 1024


def test_keys_and_values_are_both_cached() -> None:
    """L = 64, K = 8, H = 256 in int8: 262 kB a token, where the source's text once prints half."""
    config = replace(CHECKED, num_kv_heads=8, d_head=256)
    assert kv_bytes_per_token(config, "int8") == 262_144
    assert kv_bytes_per_token(config, "bf16") == 2 * 262_144
    assert kv_bytes_per_token(config, "int4") == 262_144 // 2
    # int8 caches of 8192 tokens of LLaMA-2-13B in bf16: 6.7 GB a sequence.
    assert round(kv_bytes_per_token(PRESETS["llama-2-13b"]) * 8192 / 1e9, 1) == 6.7


def test_tied_tables_count_once() -> None:
    """The L64 D4096 F16384 N32 K8 H256 V32128 model with one table: 18.4e9."""
    tied = ModelConfig("tied", 64, 4096, 16_384, 32, 8, 256, 32_128, 8192, tied_embeddings=True)
    untied = ModelConfig("untied", 64, 4096, 16_384, 32, 8, 256, 32_128, 8192)
    assert round(count_params(tied).total / 1e9, 1) == 18.4
    assert count_params(untied).total - count_params(tied).total == 4096 * 32_128
    assert forward_flops_per_token(tied, 1024) == forward_flops_per_token(untied, 1024)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.2-1b", "demo"])
def test_train_flops_closed_form(name: str) -> None:
    """18DF + 12D(N + K)H + 12TNH a layer and 6DV; a causal kernel halves the third term."""
    c, t = PRESETS[name], 2048
    matmuls = 18 * c.d_model * c.d_ff + 12 * c.d_model * (c.num_heads + c.num_kv_heads) * c.d_head
    scores = 12 * t * c.num_heads * c.d_head
    vocab = 6 * c.d_model * c.vocab_size
    assert train_flops_per_token(c, t, causal=False) == c.num_layers * (matmuls + scores) + vocab
    assert train_flops_per_token(c, t) == c.num_layers * (matmuls + scores / 2) + vocab
    assert forward_flops_per_token(c, t) == train_flops_per_token(c, t) / 3


def test_six_flops_a_parameter() -> None:
    """6 x parameters x tokens: LLaMA-3-70B over 15e12 tokens is 6.3e24 FLOPs."""
    assert 6 * count_params(PRESETS["llama-3-70b"]).total * 15e12 == pytest.approx(6.3e24, rel=0.01)


def test_attention_equals_the_matmuls_at_8d() -> None:
    """F = 4D, D = NH: 72 D^2 + 24 D^2 a layer against 12 T D over the full square."""
    config = replace(CHECKED, vocab_size=1)
    matmuls = train_flops_per_token(config, 0) - 6 * config.d_model
    assert train_flops_per_token(config, 8 * 4096, causal=False) - train_flops_per_token(config, 0) == matmuls


def test_the_demo_has_five_million_parameters() -> None:
    assert round(count_params(demo()).total / 1e6, 1) == 5.2
