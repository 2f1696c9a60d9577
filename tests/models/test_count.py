"""Counts against published figures, closed forms, and Hugging Face's own models."""

from dataclasses import replace

import pytest

from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MoE
from meshwright.models.count import (
    cached_positions,
    choice_biases,
    count_params,
    forward_flops,
    forward_flops_per_token,
    generation_intensity,
    kv_bytes_per_token,
    kv_cache_bytes,
    kv_read_bytes,
    matmul_intensity,
    prefill_intensity,
    read_positions,
    seen_keys,
    train_flops_per_token,
)
from meshwright.models.layer_kinds import Window
from meshwright.models.presets import PRESETS


def test_a_dense_model_uses_all_its_parameters() -> None:
    count = count_params(PRESETS["gemma-2-9b"])
    assert count.active == count.total and count.router == 0


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
    assert round(count_params(PRESETS["demo"]).total / 1e6, 1) == 5.2


MIXED = ModelConfig("mixed", 64, 4096, 16_384, 32, 8, 256, 32_128, 8192, moe=MoE(16, 2, 16_384))


def test_experts_of_the_inference_problem() -> None:
    """E = 16, k = 2 on the L64 D4096 F16384 N32 K8 H256 V32128 model: 212e9, of which 31.2e9 active.

    The source writes 32.2e9 once and 31.2e9 elsewhere; 212e9 = 64 * 3EDF + attention + one table.
    """
    tied = replace(MIXED, tied_embeddings=True)
    count = count_params(tied)
    assert round(count.total / 1e9) == 212
    assert count.active / 1e9 == pytest.approx(31.2, abs=0.1)  # 31.27, which the source cuts off
    assert count.mlp == 3 * 16 * 64 * 4096 * 16_384
    assert count.router == 64 * 4096 * 16
    assert count.total - count.active == 3 * 14 * 64 * 4096 * 16_384


def test_an_expert_layer_takes_three_k_d_f() -> None:
    flops = forward_flops(MIXED, 0)
    assert flops.mlp == 2 * 64 * 3 * 2 * 4096 * 16_384
    assert flops.router == 2 * 64 * 4096 * 16
    assert flops.scores == 0


def test_an_ungated_feed_forward_takes_12df() -> None:
    config = replace(CHECKED, gated=False, activation="gelu")
    assert 3 * forward_flops(config, 0).mlp == 12 * 64 * 4096 * 16_384
    assert count_params(config).mlp == 2 * 64 * 4096 * 16_384


def test_deepseek_v3_used_a_fifth_of_its_machines() -> None:
    """14.8e12 tokens with 37e9 active parameters in 2.79e6 hours of 1.513e15 FLOP/s: 21.7%."""
    active = count_params(PRESETS["deepseek-v3"]).active
    assert active / 1e9 == pytest.approx(37, rel=0.02)
    of_printed, of_counted = (6 * n * 14.8e12 / (2.79e6 * 3600 * 1.513e15) for n in (37e9, active))
    assert of_printed == pytest.approx(0.217, abs=1e-3)  # the source rounds 3.286e24 FLOPs to 3.3e24
    assert of_counted == pytest.approx(0.217, rel=0.02)


def test_projections_equal_scores_at_twice_d() -> None:
    """QKVO 24 B T D N H against 12 B T^2 N H for N = K: equal at T = 2D."""
    flops = forward_flops(CHECKED, 2 * 4096, causal=False)
    assert flops.attention == flops.scores


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("seq_len", "size"), [(64, None), (64, 16), (64, 64), (64, 100), (7, 3)])
def test_seen_keys_are_counted(seq_len: int, size: int | None, chunked: bool) -> None:
    """The closed form counts a query's own key half, as causal kernels' FLOPs are told."""
    window = None if size is None else Window(size, chunked)
    first = [max(0, window.first(position)) if window else 0 for position in range(seq_len)]
    seen = sum(position + 1 - first[position] for position in range(seq_len))
    # Of those of a sliding window's queries that see a whole one, the own key counts whole.
    halves = seq_len / 2 if chunked else min(size or seq_len, seq_len) / 2
    assert seen_keys(seq_len, window) == pytest.approx((seen - halves) / seq_len)
    assert read_positions(seq_len, window) == seq_len - first[-1]
    assert cached_positions(seq_len, window) == max(p + 1 - f for p, f in enumerate(first))


def test_local_layers_see_their_window_alone() -> None:
    """Gemma 2: half of 26 layers see 4096 of 8192 positions; 2 T N (H + H) a layer."""
    scores = forward_flops(PRESETS["gemma-2-2b"], 8192).scores
    assert scores == 13 * (4096 + 4096 * (1 - 4096 / (2 * 8192))) * 4 * 8 * 256


def test_a_local_layer_caches_its_window() -> None:
    """Gemma 3 1b: 22 of 26 layers keep 512 positions; 2 K H elements each, 2 bytes."""
    config = PRESETS["gemma-3-1b"]
    assert [window for window in config.windows if window is None] == [None] * 4
    assert kv_bytes_per_token(config) == 26 * 2 * 256 * 2
    assert kv_cache_bytes(config, 32_768) == (22 * 512 + 4 * 32_768) * 2 * 256 * 2
    assert kv_cache_bytes(config, 300) == 300 * kv_bytes_per_token(config)


def test_latent_attention_caches_the_latent_and_one_rotary_key() -> None:
    """DeepSeek-V3: 61 layers of 512 + 64 elements, 70 kB a token in bf16."""
    assert kv_bytes_per_token(PRESETS["deepseek-v3"]) == 61 * 576 * 2 == 70_272


def test_compressed_keys_are_cached_with_an_index_of_entries_only() -> None:
    """DeepSeek-V4-Flash at S = 4096: 43 windows of 128, 21 layers with S / 4 entries, 20 with S / 128.

    An entry has H = 512 elements, and an index's key 128, as compressed_kv of transformers' cache has.
    """
    entries = 21 * 1024 * (512 + 128) + 20 * 32 * 512
    assert kv_cache_bytes(PRESETS["deepseek-v4-flash"], 4096) == 2 * (43 * 128 * 512 + entries)


def test_layers_that_share_a_cache_are_read_each() -> None:
    config = replace(CHECKED, layers_per_cache=4)
    assert kv_bytes_per_token(config) == kv_bytes_per_token(CHECKED) / 4
    assert kv_cache_bytes(config, 100) == 100 * kv_bytes_per_token(config)
    assert kv_read_bytes(config, 100) == kv_cache_bytes(CHECKED, 100)


@pytest.mark.parametrize("num_kv_heads", [1, 8, 32])
def test_attention_intensity_closed_forms(num_kv_heads: int) -> None:
    """Prefill T G / (G + 1), generation S G / (G + S), which nears G."""
    config, group = replace(CHECKED, num_kv_heads=num_kv_heads), 32 / num_kv_heads
    assert prefill_intensity(config, 2048) == pytest.approx(2048 * group / (group + 1))
    assert generation_intensity(config, 2048) == pytest.approx(2048 * group / (group + 2048))
    assert generation_intensity(config, 10**7) == pytest.approx(group, rel=1e-5)
    assert generation_intensity(config, 2048, "int8") == 2 * generation_intensity(config, 2048)


def test_a_window_bounds_what_attention_does_for_a_byte() -> None:
    """Of Gemma 3 1b's 26 layers 22 see 512 of 4096 keys: prefill T G / (G + 1) a layer, of each its share."""
    config, group = PRESETS["gemma-3-1b"], 4
    mean_keys = (22 * 512 + 4 * 4096) / 26
    assert prefill_intensity(config, 4096) == pytest.approx(mean_keys * group / (group + 1))
    assert generation_intensity(config, 4096) == pytest.approx(mean_keys * group / (group + mean_keys))


def test_latent_attention_reads_a_key_once_for_all_heads() -> None:
    config = PRESETS["deepseek-v3"]
    assert generation_intensity(config, 10**8) == pytest.approx(128 * (512 + 576) / 576, rel=1e-4)
    assert prefill_intensity(config, 4096) == 4096 / 2


def test_matmul_intensity_nears_the_batch() -> None:
    """2 B D F / 2 (B D + D F + B F); a single token reads each weight for two FLOPs."""
    d, f, b = 4096, 16_384, 240
    assert matmul_intensity(CHECKED, "mlp", b) == pytest.approx(b * d * f / (b * d + d * f + b * f))
    assert matmul_intensity(CHECKED, "mlp", 1) == pytest.approx(1, rel=1e-3)
    assert matmul_intensity(CHECKED, "router", 1) == 0.0


def test_experts_need_e_over_k_times_the_batch() -> None:
    """All 16 experts are read for 2 of them a token: an eighth of the dense model's intensity."""
    dense = matmul_intensity(CHECKED, "mlp", 64)
    assert matmul_intensity(replace(MIXED, vocab_size=8), "mlp", 64) == pytest.approx(dense / 8, rel=0.02)


def test_biases_that_choose_experts_are_buffers_in_transformers() -> None:
    """num_parameters() of transformers' DeepSeek-V3 leaves out 58 layers x 256 experts."""
    config = PRESETS["deepseek-v3"]
    assert choice_biases(config) == 58 * 256
    assert count_params(config).total - choice_biases(config) == 671_026_404_352
    assert choice_biases(PRESETS["mixtral-8x7b"]) == 0
