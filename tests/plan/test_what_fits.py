"""What fits a machine: the largest batch and context fit, and one more does not."""

import pytest

import meshwright as mw
from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.plan.serve.phase import price_phase
from meshwright.plan.train import price
from meshwright.plan.what_fits import LORA_RANK, SERVING, TRAINING, verdicts


def by_way(model: str, hardware: str, seq_len: int) -> dict:
    return {one.way: one for one in verdicts(mw.model(model), catalog.load(hardware), seq_len)}


def test_every_way_has_a_verdict() -> None:
    ways = by_way("llama-3-8b", "rtx4090:1", 4096)
    assert list(ways) == [*TRAINING, *SERVING]
    # 8.03e9 parameters: 16 GB in bf16, and 64 GB of moments, on 24 GB.
    assert [way for way, one in ways.items() if not one.fits] == list(TRAINING)[:2]
    assert "more than it has" in (ways["train all weights"].why_not or "")
    assert ways["serve in int4"].one_stream > ways["serve in bf16"].one_stream


def test_the_largest_batch_and_context_fit_and_more_do_not() -> None:
    config, machine = mw.model("llama-3-8b", lora_rank=LORA_RANK), catalog.load("a100-40gb:1")
    lora = by_way("llama-3-8b", "a100-40gb:1", 2048)["train LoRA"]
    layout = Layout.of(remat="full")
    assert price(config, machine, Workload(lora.max_batch, 2048), layout).fits
    assert not price(config, machine, Workload(lora.max_batch + 1, 2048), layout).fits
    served = by_way("llama-3-8b", "a100-40gb:1", 2048)["serve in bf16"]
    point = price_phase(mw.model("llama-3-8b"), machine, Workload(1, 2048, "generate"), [Layout.of()])
    assert served.max_batch == point.max_batch and served.one_stream == pytest.approx(1 / point.step_seconds)


def test_quantised_weights_beside_adapters_need_a_quarter() -> None:
    """QLoRA (Dettmers et al. 2023): 65B on one GPU of 48 GB; here 70B on 80 GB. 0.56 bytes a weight."""
    ways = by_way("llama-3-70b", "h100:1", 2048)
    quantised = ways["train QLoRA, nf4"]
    assert not ways["train LoRA"].fits and quantised.fits
    assert 70.6e9 * 0.56 < quantised.needed_bytes < 60e9
    assert not quantised.not_run


def test_a_model_without_adapters_says_so() -> None:
    assert "latent attention" in (by_way("deepseek-v2-lite", "h200:1", 2048)["train LoRA"].why_not or "")


def test_a_machine_of_several_chips_splits_weights_and_heads() -> None:
    ways = by_way("llama-3-70b", "h100:8", 4096)
    assert ways["train LoRA"].layout.startswith("fsdp=8") and ways["serve in bf16"].layout.startswith(
        "tensor=8"
    )
    assert ways["train LoRA"].max_batch % 8 == 0
