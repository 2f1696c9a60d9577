"""What is said of a plan: true of the priced figures, whatever they are."""

import json
import re
from contextlib import suppress
from functools import cache
from itertools import pairwise
from math import isfinite

import pytest

from meshwright.errors import LayoutError
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.candidate import Candidate
from meshwright.plan.explain.batches import BatchRange, batch_range, budget, critical_batch
from meshwright.plan.explain.explanation import Explanation, explain, traffic
from meshwright.plan.explain.rejected import (
    best_schedule,
    bound_seconds,
    nearest_legal,
    resource_name,
    usual_layouts,
    wider_tensor,
)
from meshwright.plan.rank import TIE
from meshwright.plan.train import Search, price, search

CASES = {
    "8B on 32 v5e": ("llama-3-8b", "v5e:4x8", Workload(128, 4096)),
    "13B on 64 v5p": ("llama-2-13b", "v5p:4x4x4", Workload(512, 4096)),
    "8B on 2 nodes": ("llama-3-8b", "h100:2x8", Workload(128, 8192)),
    "405B on a node": ("llama-3.1-405b", "h100:8", Workload(64, 4096)),
    "tiny on a host": ("tiny", "cpu:8", Workload(16, 64)),
}


@cache
def found(case: str) -> Search:
    model, hardware, workload = CASES[case]
    dtypes = ("f32",) if hardware.startswith("cpu") else ("bf16",)
    return search(load_model(model), load(hardware), workload, weights_dtype=dtypes[0], compute_dtypes=dtypes)


@cache
def said(case: str) -> Explanation:
    model, hardware, _ = CASES[case]
    return explain(
        load_model(model), load(hardware), found(case), num_tokens=10**12, critical_tokens=4 * 10**6
    )


EVERY = pytest.mark.parametrize("case", CASES)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * ("v5" in case)) for case in CASES]
)
def test_figures_are_finite_and_json(case: str):
    document = said(case).to_dict()
    json.dumps(document, allow_nan=False)
    assert document.keys() == {
        *("explanation", "thresholds", "rejected", "batch_range", "budget", "critical_batch"),
    }
    assert not re.search(
        r"\bnan\b|\binf\b|\bNone\b(?! of)|-\d+(\.\d+)? (s|ms|us)\b", str(document["explanation"])
    )


@EVERY
def test_shares_of_the_step_are_those_of_its_terms(case: str):
    best = found(case).best
    assert sum(bound_seconds(best).values()) == pytest.approx(best.step_seconds)
    section = next(s for s in said(case).sections if s.title == "Where the time goes")
    largest = resource_name(best.cost.bound, best.hardware)
    assert largest in section.paragraphs[1]
    assert f"{best.mfu:.1%}" in section.paragraphs[0]


@EVERY
def test_every_axis_above_one_is_explained_and_no_other(case: str):
    best = found(case).best
    text = str(said(case).sections[0])
    for axis in ("pipe", "data", "fsdp", "context", "tensor"):
        degree = best.layout.word(axis)
        assert (f"{axis}={degree}:" in text) == (degree > 1)
    assert f"remat={best.layout.schedule.remat}" in text


@EVERY
def test_the_rejected_are_slower_or_do_not_work(case: str):
    best = found(case).best
    for one in said(case).rejected:
        assert one.layout != str(best.layout)
        if one.reason == "faster":
            assert -TIE < float(one.numbers["slower"]) < 0, "the search missed a usual layout"
        if one.reason == "slower" and best.fits:
            seconds = float(one.numbers["step_seconds"])
            assert seconds >= best.step_seconds * (1 - 1e-9)
            assert one.numbers["slower"] == pytest.approx(seconds / best.step_seconds - 1, abs=1e-12)
        if one.reason == "memory":
            over = float(one.numbers["bytes_per_chip"]) - best.hardware.chip.program_bytes
            assert one.numbers["over_bytes"] == over > 0
        if one.reason in ("divides", "batch"):
            assert one.text and (one.nearest is None or one.nearest)


def test_pure_data_parallelism_does_not_fit_and_says_by_how_much():
    """13e9 parameters: 130 GB of weights and moments, and gradients, in 103 GB."""
    rejected = {one.name: one for one in said("13B on 64 v5p").rejected}
    alone = rejected["pure data parallelism"]
    assert alone.reason == "memory" and alone.numbers["largest"] == "optimizer"
    assert "does not fit: it needs" in alone.text and "than the 103 GB available" in alone.text
    assert "104 GB are optimizer" in alone.text


def test_too_few_sequences_say_how_many():
    config, hardware, workload = load_model("llama-2-13b"), load("v5p:16x16x16"), Workload(512, 4096)
    best = price(config, hardware, workload, Layout.of(fsdp=512, tensor=8, sequence_parallel=True))
    result = explain(config, hardware, Search((best,), 1, 0.0, config, workload))
    rejected = {one.name: one for one in result.rejected}
    alone = rejected["pure FSDP"]
    assert alone.reason == "batch" and alone.nearest == "--batch-tokens 16777216"
    assert "needs 4,096 sequences, one per shard; the batch has 512" in alone.text
    data = rejected["pure data parallelism"]
    assert "Even then it does not fit: it needs" in data.text
    mixed = rejected["FSDP with tensor parallelism"]
    assert mixed.layout.startswith("fsdp=1024,tensor=4")  # the chapter's answer
    assert mixed.nearest is not None and mixed.nearest.startswith("fsdp=512,tensor=8")
    assert "is the chosen one" in mixed.text


def test_what_does_not_divide_names_the_nearest_that_does():
    """11,200 sequences are 5 over each of 2,240 ranks, and 1.25 over each of 8,960."""
    config, hardware, workload = load_model("llama-3-70b"), load("v5p:16x20x28"), Workload(11_200, 4096)
    best = price(config, hardware, workload, Layout.of(data=35, fsdp=64, tensor=4, remat="full"))
    result = explain(config, hardware, Search((best,), 1, 0.0, config, workload))
    alone = next(one for one in result.rejected if one.name == "pure FSDP")
    assert alone.reason == "divides" and alone.nearest is not None
    assert "11200 sequences (B) do not divide over fsdp·microbatches = 8960·1 = 8960" in alone.text
    near = Layout.parse(alone.nearest)
    assert (near.fsdp, near.tensor) == (2240, 4)


def test_a_next_best_mesh_that_ties_is_said_to():
    config, hardware, workload = load_model("llama-3-8b"), load("v5e:4x4"), Workload(256, 4096)
    result = search(config, hardware, workload, weights_dtype="bf16", compute_dtypes=("bf16",))
    other = next(c for c in result.candidates[1:] if c.layout.mesh != result.best.layout.mesh)
    assert result.is_tie(other)
    runner_up = explain(config, hardware, result).rejected[0]
    assert runner_up.layout == str(other.layout)
    assert runner_up.text.endswith(". That is a tie; the simpler layout is ranked first")


def test_beside_a_layout_that_was_asked_for_others_may_be_faster():
    config, hardware, workload = load_model("llama-3-8b"), load("h100:2x8"), Workload(128, 8192)
    asked = price(config, hardware, workload, Layout.of(fsdp=2, tensor=8, remat="full", microbatches=8))
    result = explain(config, hardware, Search((asked,), 1, 0.0, config, workload))
    alone = next(one for one in result.rejected if one.name == "pure FSDP")
    assert alone.reason == "faster" and float(alone.numbers["slower"]) < 0
    assert re.search(r"takes [\d.]+ s, [\d.]+% less: ", alone.text)
    assert [s.title for s in result.sections][3] == "Other layouts"


def test_nothing_fits_says_so():
    text = str(said("405B on a node"))
    assert "None of these layouts fits either" in text
    assert "To make it fit" in text and "To go faster" not in text
    best = found("405B on a node").best
    chips = -(-best.memory.total * 8 // best.hardware.chip.program_bytes)
    assert f"would fill {chips:,} chips; --smallest finds the fewest that suffice" in text
    assert said("405B on a node").batch_range.max_tokens is None


def test_nearest_legal_layouts_have_as_many_chips():
    layout = Layout.of(fsdp=24, tensor=4)
    for near in (*nearest_legal(layout), *wider_tensor(layout)):
        assert near.mesh.num_devices == layout.mesh.num_devices and near != layout


def test_usual_layouts_use_every_chip():
    for model, hardware, workload in CASES.values():
        machine = load(hardware)
        for _, layout in usual_layouts(load_model(model), machine, workload):
            assert layout.mesh.num_devices == machine.num_chips


def test_gpu_clusters_are_compared_with_megatrons_recipe():
    config, hardware, workload = load_model("llama-3.1-405b"), load("h100:64x8"), Workload(512, 8192)
    named = dict(usual_layouts(config, hardware, workload))
    megatron = named["tensor, pipeline and data parallelism (Megatron)"]
    assert (megatron.tensor, megatron.rules.zero_stage, megatron.mesh.num_devices) == (8, 1, 512)
    assert 4 * 406e9 / (8 * megatron.pipe) <= hardware.chip.program_bytes / 2
    for one_domain in ("h100:8", "v5p:4x4x4"):
        assert not any("Megatron" in name for name, _ in usual_layouts(config, load(one_domain), workload))


def test_mixtures_of_experts_are_compared_with_expert_parallelism():
    named = dict(usual_layouts(load_model("mixtral-8x7b"), load("v5p:4x4x4"), Workload(512, 4096)))
    layout = named["FSDP with expert parallelism"]
    assert (layout.fsdp, layout.degree("expert"), layout.mesh.num_devices) == (64, 8, 64)


def test_the_best_schedule_is_the_best_of_all_that_are_tried():
    config, hardware, workload = load_model("llama-3-8b"), load("v5e:4x8"), Workload(128, 4096)
    best = best_schedule(config, hardware, workload, Layout.of(fsdp=32))
    assert best.fits
    for remat in ("attention", "matmuls", "full"):
        for microbatches in (1, 2, 4):
            other = price(
                config, hardware, workload, Layout.of(fsdp=32, remat=remat, microbatches=microbatches)
            )
            assert not other.fits or other.step_seconds >= best.step_seconds * (1 - 1e-9)


def test_traffic_is_what_the_priced_transfers_take():
    best = price(
        load_model("llama-2-13b"), load("v5p:4x4x4"), Workload(512, 4096), Layout.of(fsdp=16, tensor=4)
    )
    moved = traffic(best, "tensor")
    assert moved is not None and moved.seconds > 0 and 0 <= moved.hidden <= 1
    assert traffic(best, "context") is None


class TestBatches:
    def range_of(self, case: str) -> tuple[BatchRange, Candidate]:
        return said(case).batch_range, found(case).best

    @pytest.mark.parametrize("case", ["8B on 32 v5e", "13B on 64 v5p", "8B on 2 nodes"])
    def test_the_least_batch_is_bound_by_compute_and_the_next_smaller_is_not(self, case: str):
        workload = CASES[case][2]
        batches, best = self.range_of(case)
        shards = best.layout.num_batch_shards
        assert batches.min_tokens is not None and batches.min_tokens % (shards * workload.seq_len) == 0
        assert self.bound(case, batches.min_tokens) == "compute"
        if batches.min_tokens > shards * workload.seq_len:
            assert self.bound(case, batches.min_tokens - shards * workload.seq_len) != "compute"

    def bound(self, case: str, tokens: int) -> str | None:
        """With as few microbatches as its schedule takes, or as large ones; None where it runs neither."""
        model, hardware, workload = CASES[case]
        layout = found(case).best.layout
        batch = Workload(tokens // workload.seq_len, workload.seq_len)
        rounds = round(layout.schedule.microbatches * tokens / workload.num_tokens / layout.pipe)
        priced = []
        for microbatches in (layout.pipe, max(1, rounds) * layout.pipe):
            with suppress(LayoutError):
                scheduled = layout.replace(microbatches=microbatches)
                priced.append(price(load_model(model), load(hardware), batch, scheduled))
        fastest = min(priced, key=lambda c: (not c.fits, c.step_seconds), default=None)
        return fastest.cost.bound if fastest else None

    def test_the_most_that_fits_fits_and_one_more_a_microbatch_does_not(self):
        model, hardware, workload = CASES["13B on 64 v5p"]
        batches, best = self.range_of("13B on 64 v5p")
        assert batches.max_tokens is not None and batches.max_tokens >= workload.num_tokens
        config, machine = load_model(model), load(hardware)
        step = best.layout.num_batch_shards * best.layout.schedule.microbatches
        most = batches.max_tokens // workload.seq_len
        assert price(config, machine, Workload(most, workload.seq_len), best.layout).fits
        assert not price(config, machine, Workload(most + step, workload.seq_len), best.layout).fits

    def test_no_batch_helps_what_activations_bind(self):
        """Tensor parallelism over 64 chips of a torus waits in proportion to the batch."""
        config, hardware = load_model("llama-2-7b"), load("v5e:4x8").ideal()
        workload, layout = Workload(64, 4096), Layout.of(tensor=32, remat="full", microbatches=16)
        chosen = price(config, hardware, workload, layout)
        batches = batch_range(config, hardware, workload, chosen)
        assert chosen.cost.bound == "ici"
        assert (batches.min_tokens, batches.tokens_per_chip, batches.bound) == (None, None, "ici")


class TestBudget:
    def test_days_and_chip_hours(self):
        best = found("8B on 32 v5e").best
        run = budget(best, 10**12)
        assert run.steps == -(-(10**12) // (128 * 4096))
        assert run.seconds == pytest.approx(run.steps * best.step_seconds)
        assert run.days == pytest.approx(run.seconds / 86_400)
        assert run.chip_hours == pytest.approx(32 * run.seconds / 3600)
        assert run.flops == pytest.approx(run.steps * best.model_flops)

    def test_an_unknown_price_is_none_and_a_known_one_counts(self):
        from dataclasses import replace

        best = found("8B on 32 v5e").best
        free = replace(best.hardware.chip, price_per_chip_hour=None)
        dear = replace(best.hardware.chip, price_per_chip_hour=2.0)
        unknown, known = (
            budget(replace(best, hardware=replace(best.hardware, chip=chip)), 10**12) for chip in (free, dear)
        )
        assert unknown.price is None
        assert known.price == pytest.approx(2 * known.chip_hours)


class TestCriticalBatch:
    RANGE = BatchRange(min_tokens=2**20, max_tokens=None, tokens_per_chip=1024.0, bound="compute")

    def test_below_and_above(self):
        below = critical_batch(Workload(512, 4096), 2**22, self.RANGE)
        above = critical_batch(Workload(4096, 4096), 2**22, self.RANGE)
        assert (below.times, below.crossed) == (0.5, False)
        assert (above.times, above.crossed) == (4.0, True)
        assert below.more_tokens == 1.5

    def test_chips_at_which_it_is_reached(self):
        assert critical_batch(Workload(512, 4096), 2**22, self.RANGE).max_chips == 4096

    def test_unknown_where_no_batch_is_bound_by_compute(self):
        never = BatchRange(None, None, None, "ici")
        assert critical_batch(Workload(512, 4096), 2**22, never).max_chips is None


def test_sections_come_in_reading_order():
    titles = [section.title for section in said("8B on 32 v5e").sections]
    assert titles == [
        *("The layout", "Where the time goes", "Memory", "Why not another", "Rules of thumb"),
        *("Batch", "To go faster", "Budget"),
    ]


def test_thresholds_grow_with_nothing_but_their_case():
    limits = {t.name: t.limit for t in said("13B on 64 v5p").thresholds}
    assert all(isfinite(limit) and limit > 0 for limit in limits.values())
    overlapped, in_turn = (
        limits["fsdp_with_tensor_tokens_per_chip"],
        limits["fsdp_with_tensor_tokens_per_chip_in_turn"],
    )
    assert in_turn == pytest.approx(4 * overlapped)


def test_rejected_keep_their_order():
    names = [one.name for one in said("8B on 32 v5e").rejected]
    order = ["the next best", "pure data parallelism", "data parallelism with", "pure FSDP", "FSDP with"]
    places = [next(n for n, start in enumerate(order) if name.startswith(start)) for name in names]
    assert all(one < other for one, other in pairwise(places))
