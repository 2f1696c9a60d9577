"""The planner: what it ranks, what it refuses, and the figures of the training chapter."""

import gc
import tracemalloc
from dataclasses import replace
from functools import cache

import pytest

from meshwright.cost.graph import Graph
from meshwright.errors import LayoutError, PlanError
from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Placement
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_fits
from meshwright.layout.runnable import layout_lacks, why_not
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.given import parse_conditions
from meshwright.plan.rank import plainness, ties
from meshwright.plan.space import Space
from meshwright.plan.train import Search, price, search


@cache
def _search(model: str, hardware: str, num_tokens: int, seq_len: int, weights_dtype: str = "bf16") -> Search:
    workload = Workload(num_tokens // seq_len, seq_len)
    return search(
        load_model(model), load(hardware), workload, weights_dtype=weights_dtype, compute_dtypes=("bf16",)
    )


def test_models_with_an_indexer_are_searched() -> None:
    """Blocks of queries differ among layouts that split positions."""
    sparse = replace(load_model("deepseek-v3.2"), num_layers=1, moe=None)
    words = {"weights_dtype": "bf16", "compute_dtypes": ("bf16",)}
    best = search(sparse, load("v5p:2x1x1"), Workload(2, 1024), **words).best
    assert best.fits and best.step_seconds > 0


def test_candidates_are_ranked_by_time_among_those_that_fit() -> None:
    found = _search("llama-2-13b", "v5p:4x4x4", 2**21, 4096)
    fitting = [c for c in found.candidates if c.fits]
    assert fitting == list(found.candidates[: len(fitting)])
    times = [c.step_seconds for c in fitting if not found.is_tie(c)]
    assert times == sorted(times)
    assert found.considered >= len(found.candidates)


def test_every_candidate_uses_every_chip_and_divides_the_model() -> None:
    config = load_model("llama-3-8b")
    for candidate in _search("llama-3-8b", "v5e:4x8", 2**20, 4096).candidates:
        assert candidate.layout.mesh.num_devices == 32
        check_fits(candidate.layout, config, seq_len=4096)


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
    """3M tokens on 4,096 v5p are 732 a chip: FSDP alone is bound by ICI, 1024 x 4 by compute."""
    config, hardware, workload = load_model("llama-2-13b"), load("v5p:16x16x16"), Workload(4096, 732)
    alone = price(config, hardware, workload, Layout.of(fsdp=1024, data=4))
    mixed = price(config, hardware, workload, Layout.of(fsdp=1024, tensor=4))
    assert mixed.step_seconds < alone.step_seconds
    exposed = sum(
        t.seconds for t in alone.cost.terms if t.name in ("weights over fsdp", "gradients over fsdp")
    )
    assert exposed > 0


def test_a_step_of_13b_takes_300_ms_at_40_percent() -> None:
    """The chapter's 300 ms is 6 P B at 40% MFU; ours is that price at its own MFU."""
    config, hardware, workload = load_model("llama-2-13b"), load("v5p:16x16x16"), Workload(4096, 732)
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
        "fits: tensor in {1, 2, 4, 8}, or tensor=8,kv_replicas=2, or replicate: wk[L, D, K, H]"
    )


def test_a_layout_of_other_chips_is_refused() -> None:
    with pytest.raises(LayoutError, match="has 8 devices and v5e:4x8 has 32 chips"):
        price(load_model("llama-3-8b"), load("v5e:4x8"), Workload(64, 4096), Layout.of(tensor=8))


def test_what_does_not_fit_is_ranked_by_what_it_lacks() -> None:
    found = _search("llama-3.1-405b", "h100:1x8", 2**16, 8192)
    assert not found.best.fits
    assert found.best.memory.total == min(c.memory.total for c in found.candidates)
    assert found.best.memory.total > load("h100:1x8").chip.program_bytes


class TestGiven:
    """Conditions that every layout must meet."""

    def _found(self, text: str, runnable: bool | None = None) -> Search:
        return search(
            load_model("llama-3-70b"),
            load("h100:16x8"),
            Workload(256, 8192),
            weights_dtype="bf16",
            compute_dtypes=("bf16",),
            given=parse_conditions(text),
            runnable=runnable,
        )

    def test_degrees_and_schedule(self) -> None:
        for candidate in self._found("pipe=4,interleave=4,tensor=8,remat=full").candidates:
            layout = candidate.layout
            assert (layout.pipe, layout.schedule.interleave, layout.tensor, layout.schedule.remat) == (
                4,
                4,
                8,
                "full",
            )

    def test_dtypes_and_what_is_not_searched(self) -> None:
        best = self._found("matmul_dtype=fp8,offload=true,tensor=8").best
        assert best.layout.precision.matmul_dtype == "fp8" and best.layout.schedule.offload

    def test_bounds(self) -> None:
        for candidate in self._found("pipe<=4,pipe>1,schedule!=zb-v,tensor<8,data>=2").candidates:
            layout = candidate.layout
            assert layout.pipe in (2, 4) and layout.schedule.pipeline != "zb-v"
            assert layout.tensor < 8 and layout.data >= 2

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "tensor=3",
                "--given tensor=3 leaves no layout: 128 chips do not divide over tensor = 3; "
                "fits: tensor in {1, 2, 4, 8}",
            ),
            (
                "pipe=2,tensor=16",
                "--given tensor=16 with pipe=2 leaves no layout: wk[L, D, K_tensor, H]: 8 KV heads (K) do "
                "not divide over tensor = 16; fits: tensor in {1, 2, 4, 8}",
            ),
            (
                "fsdp=32,data>=8",
                "--given fsdp=32 with data>=8 leaves no layout; fits: fsdp in {1, 2, 4, 8, 16}; or data>=8 "
                "with fsdp=32 leaves no layout; fits: data in {1, 2, 4}",
            ),
            (
                "tensor=3,pipe=3",
                "--given tensor=3: no layout that divides meets all of them; leave some out",
            ),
        ],
    )
    def test_the_condition_that_leaves_nothing_is_named(self, text: str, message: str) -> None:
        with pytest.raises(PlanError) as error:
            self._found(text)
        assert str(error.value) == f"llama-3-70b on h100:16x8: {message}"

    def test_what_does_not_run_is_ranked_and_said(self) -> None:
        found = self._found("pipe=4,tensor=8,schedule=1f1b")
        assert found.notices == (
            "No layout of the list runs yet (schedule=1f1b on 16 hosts): all can only be planned.",
        )
        assert found.faster is None

    def test_what_does_not_run_is_refused_where_only_that_is_wanted(self) -> None:
        with pytest.raises(
            PlanError, match=r"meets the request runs yet \(schedule=1f1b on 16 hosts\); --any"
        ):
            self._found("pipe=4,schedule=1f1b", runnable=True)

    def test_a_pipeline_that_is_asked_for_runs_in_lanes(self) -> None:
        found = self._found("pipe=4,tensor=8", runnable=True)
        assert {candidate.layout.schedule.pipeline for candidate in found.candidates} == {"lanes"}


def test_a_layout_has_whole_sequences_in_its_microbatches() -> None:
    config, hardware, workload = load_model("llama-3-8b"), load("v5e:4x8"), Workload(100, 4096)
    with pytest.raises(LayoutError) as error:
        price(config, hardware, workload, Layout.of(fsdp=32))
    assert str(error.value) == (
        "x[B_fsdp, T, D]: 100 sequences (B) do not divide over fsdp·microbatches = 32·1 = 32; "
        "fits: 96 sequences"
    )
    assert (
        price(config, hardware, workload, Layout.of(fsdp=32), whole=False).num_tokens == workload.num_tokens
    )


# A pipeline takes 97 microbatches as well as any number.
NO_STAGES = parse_conditions("pipe=1")


class TestBatch:
    """The batch that is planned."""

    @staticmethod
    @cache
    def _found(num_sequences: int, hardware: str = "v5e:4x8", **options) -> Search:
        return search(
            load_model("llama-3-8b"),
            load(hardware),
            Workload(num_sequences, 4096),
            weights_dtype="bf16",
            compute_dtypes=("bf16",),
            **options,
        )

    @pytest.mark.parametrize(
        "num_sequences", [*(pytest.param(n, marks=pytest.mark.slow) for n in (96, 100)), 97, 128]
    )
    def test_every_candidate_takes_whole_sequences(self, num_sequences: int) -> None:
        found = self._found(num_sequences)
        for candidate in found.candidates:
            layout = candidate.layout
            assert (
                found.workload.num_sequences % (layout.num_batch_shards * layout.schedule.microbatches) == 0
            )
            assert candidate.num_tokens == found.workload.num_tokens

    def test_one_that_divides_is_kept_and_nothing_is_said(self) -> None:
        found = self._found(128)
        assert found.workload == Workload(128, 4096) and found.notices == ()

    def test_of_a_prime_the_nearest_that_divides_is_planned_and_named(self) -> None:
        found = self._found(97, given=NO_STAGES)
        planned = found.workload.num_sequences
        assert planned != 97 and abs(planned - 97) <= 9.7
        assert found.notices[0].startswith(
            f"Planned for {planned} sequences of 4,096 tokens ({planned * 4096:,} tokens): the 97 asked for "
        )

    def test_no_batch_nearer_is_within_two_percent(self) -> None:
        """Every batch between, searched alone, takes its tokens more than 2% longer."""
        found = self._found(97, given=NO_STAGES)
        planned, best = found.workload.num_sequences, found.best.step_seconds
        for number in range(98 - abs(planned - 97), 97 + abs(planned - 97)):
            other = self._found(number, batch_within=(0.0,), given=NO_STAGES).best
            asked_seconds = other.step_seconds * max(1, 97 / number)
            assert asked_seconds > best * max(1, 97 / planned), number

    def test_where_the_batch_may_not_differ_it_does_not(self) -> None:
        found = self._found(97, batch_within=(0.0,))
        assert found.workload.num_sequences == 97 and found.notices == ()


class TestRanking:
    """Ties, and what runs."""

    def test_those_that_tie_come_first_the_plainest_foremost(self) -> None:
        found = _search("llama-2-7b", "h100:8", 2**19, 4096)
        least = min(c.step_seconds for c in found.candidates)
        number = sum(found.is_tie(c) for c in found.candidates)
        assert number > 1
        for candidate in found.candidates:
            assert found.is_tie(candidate) == (candidate.step_seconds <= 1.02 * least)
        same = found.candidates[:number]
        assert all(map(found.is_tie, same))
        plain = [plainness(c.layout) for c in same]
        assert plain == sorted(plain)

    def test_an_axis_more_needs_more_than_two_percent(self) -> None:
        assert plainness(Layout.of(fsdp=8)) < plainness(Layout.of(fsdp=4, tensor=2))
        assert plainness(Layout.of(pipe=4, data=2)) < plainness(Layout.of(pipe=4, data=2, schedule="zb-h1"))
        assert plainness(Layout.of(fsdp=8, microbatches=2)) < plainness(Layout.of(fsdp=8, microbatches=4))
        assert plainness(Layout.of(fsdp=8)) < plainness(Layout.of(fsdp=8, remat="full"))

    def test_what_does_not_run_is_beside_the_ranking(self) -> None:
        workload, config = Workload(512, 8192), load_model("llama-3.1-405b")
        machine = load("h100:64x8")
        found = search(config, machine, workload, weights_dtype="bf16", compute_dtypes=("bf16",))
        for candidate in found.candidates:
            assert why_not(config, candidate.layout, hardware=machine) is None
        assert found.faster
        faster = found.faster.candidate.layout
        assert found.faster.why_not == f"schedule={faster.schedule.pipeline} on 64 hosts"
        assert found.faster.candidate.step_seconds * 1.02 < found.best.step_seconds

    def test_on_one_host_every_schedule_runs(self) -> None:
        config, workload = load_model("llama-3-8b"), Workload(128, 4096)
        asked = {"weights_dtype": "bf16", "compute_dtypes": ("bf16",), "runnable": True}
        given = parse_conditions("pipe=4,tensor=2")
        found = search(config, load("h100:1x8"), workload, given=given, **asked)
        schedules = {one.layout.schedule.pipeline for one in found.candidates}
        assert {"1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "lanes"} >= schedules > {"interleaved"}
        assert found.faster is None


def test_what_is_runnable_has_stages_in_lanes_alone() -> None:
    found = search(
        load_model("llama-3.1-405b"),
        load("h100:32x8"),
        Workload(256, 8192),
        weights_dtype="bf16",
        compute_dtypes=("bf16",),
        runnable=True,
    )
    for candidate in found.candidates:
        assert layout_lacks(candidate.layout) is None
        assert candidate.layout.pipe == 1 or candidate.layout.schedule.pipeline == "lanes"
    assert any(candidate.layout.pipe > 1 for candidate in found.candidates)


@pytest.mark.parametrize(
    ("model", "machine"),
    [
        ("llama-3-8b", "h100:1x4"),
        pytest.param("llama-3-8b", "h100:1x8", marks=pytest.mark.slow),
        pytest.param("mixtral-8x7b", "h100:1x8", marks=pytest.mark.slow),
    ],
)
def test_no_layout_that_is_passed_over_would_have_ranked(model: str, machine: str) -> None:
    """Every layout priced, against those that the search found by bounds alone."""
    config, hardware, workload = load_model(model), load(machine), Workload(32, 2048)
    found = search(
        config,
        hardware,
        workload,
        weights_dtype="bf16",
        compute_dtypes=("bf16",),
        runnable=False,
        batch_within=(0.0,),
        num_ranked=5,
    )
    space = Space(config, hardware, workload, Layout.of())
    layouts = [choice.layout for choice in space.choices(space.meshes())]
    # A layout with several remat policies is considered once.
    assert len({layout.replace(remat="none") for layout in layouts}) == found.considered
    priced = [price(config, hardware, workload, layout) for layout in layouts]
    plainest = min(plainness(c.layout) for c in ties(priced))
    assert plainness(found.best.layout) == plainest
    exhaustive = sorted(c.step_seconds for c in priced if c.fits)[:5]
    assert sorted(c.step_seconds for c in found.candidates if c.fits)[:5] == exhaustive


@pytest.mark.slow
def test_what_a_search_kept_goes_with_it() -> None:
    """Graphs, placements and prices are gone, and a second search leaves no more than the first one did."""

    def left(model: str) -> int:
        _search.__wrapped__(model, "h100:1x4", 2**16, 2048)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    def alive() -> int:
        # By type: asking isinstance of the objects of other libraries may run their code.
        return sum(type(one) in (Graph, Placement) for one in gc.get_objects())

    _search.__wrapped__("llama-3-8b", "h100:1x4", 2**16, 2048)  # presets, catalog and modules are kept
    gc.collect()
    others = alive()  # which other tests may hold
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        first, second = left("llama-2-13b"), left("llama-2-7b")
    finally:
        tracemalloc.stop()
    assert second - before < 2 * (first - before) + 500_000 and second - before < 3_000_000
    assert alive() == others
    assert gc.isenabled()
