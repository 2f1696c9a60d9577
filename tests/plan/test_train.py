"""The planner: what it ranks, what it refuses, and the figures of the training chapter."""

import pytest

from meshwright.errors import LayoutError, PlanError
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.runs import layout_lacks
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.space import Space
from meshwright.plan.train import Search, price, search, usable_bytes


def _search(model: str, hardware: str, num_tokens: int, seq_len: int, weights_dtype: str = "bf16") -> Search:
    workload = Workload(num_tokens // seq_len, seq_len)
    return search(
        load_model(model), load(hardware), workload, weights_dtype=weights_dtype, compute_dtypes=("bf16",)
    )


def test_candidates_are_ranked_by_time_among_those_that_fit() -> None:
    found = _search("llama-2-13b", "v5p:4x4x4", 2**21, 4096)
    fitting = [c for c in found.candidates if c.fits]
    assert fitting == list(found.candidates[: len(fitting)])
    times = [c.step_seconds for c in fitting]
    assert times == sorted(times)
    assert found.considered >= len(found.candidates)


def test_every_candidate_uses_every_chip_and_divides_the_model() -> None:
    config = load_model("llama-3-8b")
    for candidate in _search("llama-3-8b", "v5e:4x8", 2**20, 4096).candidates:
        assert candidate.layout.mesh.num_devices == 32
        candidate.layout.check(config, seq_len=4096)


def test_breakdown_is_the_whole_step() -> None:
    document = _search("llama-3-8b", "v5e:4x8", 2**20, 4096).best.to_dict()
    assert sum(term["seconds"] for term in document["breakdown"]) == pytest.approx(document["step_seconds"])
    assert sum(term["share"] for term in document["breakdown"]) == pytest.approx(1.0)
    memory = document["bytes_per_chip"]
    assert memory["total"] == sum(value for key, value in memory.items() if key != "total")


def test_mfu_is_model_flops_over_the_peak() -> None:
    """6 FLOPs a matmul parameter and token, half of 12 L T N H for causal attention."""
    best = _search("llama-2-13b", "v5p:4x4x4", 2**21, 4096).best
    matmul_params = 40 * (3 * 5120 * 13824 + 4 * 5120 * 5120) + 5120 * 32000
    flops = 2**21 * (6 * matmul_params + 6 * 40 * 4096 * 5120)
    assert best.mfu == pytest.approx(flops / (best.step_seconds * 64 * 4.59e14))
    assert best.mfu <= best.hfu <= 1


def test_pure_data_parallelism_of_13b_does_not_fit_a_v5p() -> None:
    """13e9 parameters of 10 bytes, and gradients, are over 96 GB. Source: training chapter, question 3."""
    workload = Workload(4096, 1024)
    config, hardware = load_model("llama-2-13b"), load("v5p:16x16x16")
    alone = price(config, hardware, workload, Layout.of(data=4096, remat="full"))
    assert not alone.fits
    assert alone.memory.weights + alone.memory.optimizer == pytest.approx(130e9, rel=0.01)
    assert price(config, hardware, workload, Layout.of(fsdp=1024, tensor=4, remat="full")).fits


def test_fsdp_with_tensor_beats_fsdp_below_850_tokens_a_chip() -> None:
    """3M tokens on 4,096 v5p are 733 a chip: FSDP alone is bound by ICI, 1024 x 4 by compute."""
    config, hardware, workload = load_model("llama-2-13b"), load("v5p:16x16x16"), Workload(2929 * 2, 512)
    alone = price(config, hardware, workload, Layout.of(fsdp=1024, data=4))
    mixed = price(config, hardware, workload, Layout.of(fsdp=1024, tensor=4))
    assert mixed.step_seconds < alone.step_seconds
    exposed = sum(
        t.seconds for t in alone.cost.terms if t.name in ("weights over fsdp", "gradients over fsdp")
    )
    assert exposed > 0


def test_a_step_of_13b_takes_300_ms_at_40_percent() -> None:
    """The chapter's 300 ms is 6 P B at 40% MFU; ours is that price at its own MFU."""
    config, hardware, workload = load_model("llama-2-13b"), load("v5p:16x16x16"), Workload(2929, 1024)
    mixed = price(config, hardware, workload, Layout.of(fsdp=1024, tensor=4))
    assert mixed.step_seconds * mixed.mfu / 0.4 == pytest.approx(0.3, rel=0.05)


def test_the_step_never_beats_the_peak() -> None:
    for candidate in _search("llama-3-8b", "h100:4x8", 2**21, 8192).candidates:
        assert 0 < candidate.mfu <= candidate.hfu <= 1
        assert candidate.step_seconds > 0


def test_a_batch_smaller_than_its_shards_is_refused() -> None:
    workload = Workload(8, 4096)
    with pytest.raises(LayoutError) as error:
        price(load_model("llama-3-8b"), load("v5e:4x8"), workload, Layout.of(fsdp=32))
    assert str(error.value) == (
        "x[B_{data,fsdp}, T, D]: 8 sequences (B) are fewer than data·fsdp·microbatches = 32; "
        "fits: data·fsdp up to 8, or --batch-tokens 131072"
    )


def test_chips_that_nothing_divides_over_are_refused() -> None:
    """A prime factor of 37 in the chips and one sequence to split."""
    with pytest.raises(
        PlanError, match=r"1 sequences of 4096 tokens do not divide over .* fits: --batch-tokens"
    ):
        _search("llama-3-8b", "h100:37x8", 4096, 4096)


def test_a_layout_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LayoutError) as error:
        price(load_model("llama-3-8b"), load("h100:2x8"), Workload(64, 4096), Layout.of(tensor=16))
    assert str(error.value) == (
        "wk[L, D, K_tensor, H]: 8 KV heads (K) do not divide over tensor = 16; "
        "fits: tensor in {1, 2, 4, 8}, or replicate: wk[L, D, K, H]"
    )


def test_a_layout_of_other_chips_is_refused() -> None:
    with pytest.raises(LayoutError, match="has 8 devices and v5e:4x8 has 32 chips"):
        price(load_model("llama-3-8b"), load("v5e:4x8"), Workload(64, 4096), Layout.of(tensor=8))


def test_what_does_not_fit_is_ranked_by_what_it_lacks() -> None:
    found = _search("llama-3.1-405b", "h100:1x8", 2**16, 8192)
    assert not found.best.fits
    assert found.best.memory.total == min(c.memory.total for c in found.candidates)
    assert found.best.memory.total > usable_bytes(load("h100:1x8"))


class TestGiven:
    """Fields that every layout must have."""

    def _found(self, text: str) -> Search:
        workload, given = Workload(256, 8192), Layout.words_of(text)
        return search(
            load_model("llama-3-70b"),
            load("h100:16x8"),
            workload,
            weights_dtype="bf16",
            compute_dtypes=("bf16",),
            given=given,
        )

    def test_degrees_and_schedule(self) -> None:
        for candidate in self._found("pipe=4,interleave=4,tensor=8,remat=full").candidates:
            layout = candidate.layout
            assert (layout.pipe, layout.interleave, layout.tensor, layout.remat) == (4, 4, 8, "full")

    def test_dtypes_and_what_is_not_searched(self) -> None:
        best = self._found("matmul_dtype=fp8,offload=true,tensor=8").best
        assert best.layout.matmul_dtype == "fp8" and best.layout.offload

    def test_nothing_has_what_does_not_divide(self) -> None:
        with pytest.raises(PlanError) as error:
            self._found("tensor=3")
        assert str(error.value) == "llama-3-70b on h100:16x8: no layout that divides has tensor=3"


def test_what_is_runnable_has_no_stages() -> None:
    found = search(
        load_model("llama-3-70b"),
        load("h100:16x8"),
        Workload(256, 8192),
        weights_dtype="bf16",
        compute_dtypes=("bf16",),
        runnable=True,
    )
    for candidate in found.candidates:
        layout_lacks(candidate.layout)


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_no_layout_that_is_passed_over_would_have_ranked(model: str) -> None:
    """Every layout priced, against those that the search found by bounds alone."""
    config, hardware, workload = load_model(model), load("h100:1x8"), Workload(64, 2048)
    found = search(config, hardware, workload, weights_dtype="bf16", compute_dtypes=("bf16",), num_ranked=5)
    space = Space(config, hardware, workload, Layout.of(), runnable=False)
    layouts = [choice.layout for choice in space.choices(space.meshes())]
    assert len(layouts) == found.considered
    priced = [price(config, hardware, workload, layout) for layout in layouts]
    exhaustive = sorted(c.step_seconds for c in priced if c.fits)[:5]
    assert [c.step_seconds for c in found.candidates[:5] if c.fits] == exhaustive
