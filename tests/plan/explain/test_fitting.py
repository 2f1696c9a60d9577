"""The cheapest change that makes a layout fit, down to the smallest machines and batches."""

import pytest

import meshwright as mw


@pytest.mark.parametrize(
    ("model", "hardware", "sequences"),
    [("llama-3-70b", "h100:1x1", 2), ("llama-3-8b", "v5e:1x1", 1), ("llama-2-70b", "a100-80gb:1x1", 16)],
)
def test_nothing_helps_on_a_chip_that_is_far_too_small(model: str, hardware: str, sequences: int) -> None:
    best = mw.plan(model, hardware, mw.Train(batch_tokens=sequences * 2048, seq_len=2048)).best
    assert not best.fits and best.cheapest_fit() is None


def test_adapters_fit_where_all_weights_do_not() -> None:
    """70.6e9 bf16 weights over two chips are 70.6 GB each; their moments would be 282 GB more."""
    best = mw.plan("llama-3-70b", "h100:1x2", mw.Train(batch_tokens=8192, seq_len=4096)).best
    change = best.cheapest_fit()
    assert change is not None and change.words == ("--set lora_rank=16",)
    assert change.candidate.fits and 70e9 < change.candidate.needed_bytes < 80e9


def test_an_optimizer_with_less_state_comes_before_a_smaller_batch() -> None:
    """Without a host link that is fast enough to offload: 8e9 weights, moments and gradients on 96 GB."""
    best = mw.plan("llama-3-8b", "v5p:1x1x1", mw.Train(batch_tokens=4096, seq_len=4096)).best
    change = best.cheapest_fit()
    assert change is not None and change.candidate.fits
    assert not any(word.startswith("--batch-tokens") for word in change.words)
