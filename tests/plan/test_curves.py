"""Curves of the closed forms: figures of the chapters, and limits that they approach."""

from dataclasses import replace

import pytest

from meshwright.errors import HardwareError
from meshwright.hardware import catalog
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.models.presets import load_model
from meshwright.plan import curves


def values(
    plot: curves.Plot, panel: int = 0, frame: int | None = None
) -> dict[str, dict[float, float | None]]:
    shown = plot.frames[plot.first if frame is None else frame].panels[panel]
    return {name: dict(zip(plot.x, curve, strict=True)) for name, curve in shown.curves.items()}


def test_bandwidth_rises_to_that_of_both_directions():
    """8 hops of 1 us for a small array; 9e10 bytes/s for a large one, and four times that for AllToAll."""
    found = values(curves.bandwidth_plot(load("v5e:16x16")))
    assert found["AllGather"][1024] == pytest.approx(1024 / 8e-6)
    assert found["AllGather"][2**30] == pytest.approx(9e10)
    assert found["AllReduce"][2**30] == pytest.approx(4.5e10)
    assert found["AllToAll"][2**30] == pytest.approx(4 * 9e10)
    with pytest.raises(HardwareError, match="one chip and no links"):
        curves.bandwidth_plot(load("v5e:1"))


def test_a_ring_waits_for_its_devices_and_a_tree_for_their_logarithm():
    found = values(curves.ring_latency("h100", 1024))
    gather, reduce = found["AllGather"], found["AllReduce"]
    assert gather[1024] > 10 * gather[64]  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]
    assert reduce[1024] < 2 * reduce[64]  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]


def test_a_ring_takes_half_of_its_hops():
    """2 of 4 and 14 of 28 chips of v5p, whose links close; of v5e only 16 chips close, of v3 32."""
    rings = values(curves.ring_latency("v5p", 1024))["AllGather"]
    assert rings[4] == pytest.approx(2e-6) and rings[28] == pytest.approx(14e-6)
    lines = values(curves.ring_latency("v5e", 1024))["AllGather"]
    assert lines[12] == pytest.approx(11e-6) and lines[16] == pytest.approx(8e-6)
    assert values(curves.ring_latency("v3", 1024))["AllGather"][32] == pytest.approx(16e-6)
    assert list(values(curves.ring_latency("v5p", 1024, most=8))["AllGather"]) == [2, 4, 8]


def test_scores_cost_as_much_as_projections_at_four_widths():
    """The chapter has T = 2 D without, and so T = 4 D with a causal mask."""
    config = load_model("llama-2-13b")
    found = values(curves.attention_share(config, low=config.d_model))
    assert found["scores, values"][4 * config.d_model] == pytest.approx(
        found["projections"][4 * config.d_model]
    )


def test_a_model_without_attention_and_feed_forward_has_no_crossing():
    assert not "".join(curves.attention_share(load_model("falcon-mamba-7b")).remarks)
    assert "from 43,008 positions" in "".join(curves.attention_share(load_model("llama-3-8b")).remarks)


def test_the_best_fsdp_degree_of_question_3():
    """X = 1,333, so 1,024 x 4: compute-bound, and FSDP over all chips is not."""
    plot = curves.fsdp_degree(load_model("llama-2-13b"), load("v5p:16x16x16"), 3_000_000)
    assert plot.remarks == ("At 3,000,000 tokens X = 1,333 moves the fewest bytes.",)
    found = values(plot)
    assert found["step"][1024] == found["compute"][1024]
    assert found["step"][4096] == found["FSDP"][4096] and found["TP"][4096] is None
    least = min(found["step"].values())  # pyright: ignore[reportArgumentType]
    assert found["step"][1024] == least
    assert [frame.label for frame in plot.frames][plot.first] == "3,000,000 tokens"


def test_strategies_cross_where_the_closed_forms_say():
    """B / N > 850 for FSDP on three axes; with TP alpha^2 / (2 F); F = 30,000 on 16^3 about 4e5 tokens."""
    config = replace(load_model("llama-2-13b"), d_ff=30_000)
    plot = curves.strategies_over_batch(config, load("v5p:16x16x16"))
    assert "FSDP is compute-bound from 3,481,600 tokens, FSDP with TP from 443,904" in plot.remarks[0]
    ratio = values(plot, panel=1)["FSDP and TP"]
    assert ratio[2**18] < 1 < ratio[2**19]  # pyright: ignore[reportOptionalOperand, reportOperatorIssue]


def test_all_experts_move_for_the_few_that_a_token_uses():
    """FSDP takes E / k = 4 times the time over compute of a dense model of the active width."""
    mixture = load_model("mixtral-8x7b")
    dense = replace(mixture, moe=None, d_ff=2 * 14_336)
    of_dense, of_mixture = (
        values(curves.fsdp_degree(config, load("v5p:8x8x8"), 2**20)) for config in (dense, mixture)
    )
    for name, times in (("compute", 1), ("TP", 1), ("FSDP", 4)):
        for x, seconds in of_dense[name].items():
            assert seconds is None or of_mixture[name][x] == pytest.approx(times * seconds)


def test_generation_over_the_batch():
    """The table of LLaMA-2 13B: 4.98 to 249 ms of 8.2e11 bytes/s, here of 8.1e11."""
    config = replace(load_model("llama-2-13b"), max_seq_len=8192)
    plot = curves.decode_batch(config, load("v5e:8"), 8192, Layout.of(tensor=8), [1, 8, 16, 32, 64, 240])
    book = dict(zip(plot.x, [4.98, 12.13, 20.30, 36.65, 69.33, 249.09], strict=True))
    for name, curve in values(plot).items():
        for batch, seconds in curve.items():
            assert seconds is not None and seconds * 1e3 == pytest.approx(book[batch], rel=0.05), (
                name,
                batch,
            )
    assert plot.remarks == ("At most 16 sequences fit.",)


@pytest.mark.parametrize("name", ["docs/book/quiz-30b.toml", "llama-2-13b", "llama-2-13b with 8 KV heads"])
def test_ideal_prices_are_the_closed_form(name: str) -> None:
    """Within 5%, although each operation has a roofline of its own, and `wk` and `wv` may be copied."""
    config = replace(load_model(name.split()[0]), max_seq_len=8192)
    if "with" in name:
        config = replace(config, num_kv_heads=8)
    machine, layout = load("v5e:8"), Layout.of(tensor=8)
    if "quiz" in name:
        machine = load("v5e:4x4")
        layout = Layout.of(tensor=4, kv_replicas=4, cache="batch", weights_dtype="int8")
    closed, ideal = values(curves.decode_batch(config, machine, 8192, layout, [4, 64, 240])).values()
    assert ideal == pytest.approx(closed, rel=0.05)


def test_look_ahead():
    """Tokens of a step: 1 + a + a^2 + ...; drafts that cost nothing always pay, dear ones never."""
    plot = curves.look_ahead([0.5, 1.0], 0.0, most=3)
    assert values(plot)["acceptance 0.5"] == {0: 1, 1: 1.5, 2: 1.75, 3: 1.875}
    assert plot.remarks[1] == "acceptance 1: best with k = 3, 4.00 times as fast."
    assert "drafts do not pay" in curves.look_ahead([0.1], 0.5).remarks[0]


def test_the_roofline_meets_the_peak_at_the_ridge():
    """A v5e has 197e12 FLOP/s in bf16 and 810e9 B/s of memory: compute-bound from 243 FLOPs a byte."""
    plot = curves.roofline("v5e")
    rates = plot.frames[0].panels[0].curves["bf16"]
    peak = catalog.chip("v5e").flops("bf16")
    assert rates[0] == catalog.chip("v5e").hbm_bytes_per_second and rates[-1] == peak
    reached = next(at for at, rate in zip(plot.x, rates, strict=True) if rate == peak)
    assert reached == 256 and "bf16 243" in plot.remarks[0]
