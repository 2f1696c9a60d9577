"""Bytes on a chip where no compiler plans a step, against what each operation is known to keep."""

from dataclasses import replace

import pytest
from tests.cost.recorded import BF16, LAYER_WEIGHTS, SMALL, TOKENS, D, F, H, K, L, N, record

from meshwright.cost.memory import Memory
from meshwright.cost.record import record_loss
from meshwright.cost.recorder import PassShape
from meshwright.cost.step_cost import StepPricer
from meshwright.cost.step_memory import flushes, reported_bytes, step_memory
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.programs.program import PROGRAMS, TrainingProgram

EAGER = PROGRAMS["nanotron"]
F32 = 4
BTD, BTF = TOKENS * D, TOKENS * F
# A vocabulary so large that the loss is the peak.
WIDE = replace(SMALL, vocab_size=64_000)
WIDE_LOGITS = TOKENS * 64_000
PURE = Layout.of(optimizer_dtype="bf16")


def _memory(layout: Layout, config: ModelConfig = SMALL, runs: TrainingProgram = EAGER) -> Memory:
    return step_memory(record(layout, config), layout, runs)


def _planned(layout: Layout, config: ModelConfig = SMALL) -> Memory:
    return step_memory(record(layout, config), layout)


def test_the_steps_of_an_operation_are_kept_where_it_runs_once() -> None:
    """Two norms of 4 + 2 bytes each, silu(gate), and the second copy of keys and values (N/K = 2)."""
    layer = 2 * (F32 + BF16) * BTD + BF16 * BTF + BF16 * 2 * TOKENS * K * H * (N // K - 1)
    last_norm = (F32 + BF16) * BTD
    more = {remat: _memory(Layout.of(remat=remat)).activations for remat in ("none", "matmuls", "full")}
    assert more["none"] == _planned(Layout.of()).activations + L * layer + last_norm
    for remat in ("matmuls", "full"):
        assert more[remat] == _planned(Layout.of(remat=remat)).activations + last_norm


def test_a_kernel_that_fuses_the_steps_keeps_its_operands_alone() -> None:
    every = replace(EAGER, fused=("norms", "gates", "keys"))
    assert _memory(Layout.of(), runs=every).activations == _planned(Layout.of()).activations
    gates = _memory(Layout.of(), runs=replace(EAGER, fused=("gates",))).activations
    assert gates == _memory(Layout.of()).activations - L * BF16 * BTF


def test_a_layer_norm_is_one_kernel_and_a_plain_activation_one_array() -> None:
    """What is left are the keys and values of the heads that share them."""
    gpt = replace(SMALL, norm="layer", gated=False)
    copies = BF16 * 2 * TOKENS * K * H * (N // K - 1)
    assert _memory(Layout.of(), gpt).activations == _planned(Layout.of(), gpt).activations + L * copies


@pytest.mark.parametrize(("heads", "copies"), [(4, 1), (8, 0), (1, 7)])
def test_keys_are_copied_for_the_heads_that_share_them(heads: int, copies: int) -> None:
    grouped, alone = (replace(SMALL, num_kv_heads=n, norm="layer", gated=False) for n in (heads, N))
    more = _memory(Layout.of(), grouped).activations - _planned(Layout.of(), grouped).activations
    assert more == L * BF16 * 2 * TOKENS * heads * H * copies
    assert _memory(Layout.of(), alone).activations == _planned(Layout.of(), alone).activations


class TestLoss:
    """Beside the logits, which activations count: logarithms, their cotangents and those of the logits."""

    @staticmethod
    def _beside(layout: Layout, runs: TrainingProgram = EAGER) -> int:
        """Of the buffers: what a vocabulary of 64,000 needs over one of 32,000, doubled."""
        half = replace(SMALL, vocab_size=32_000)
        return 2 * (_memory(layout, WIDE, runs).buffers - _memory(layout, half, runs).buffers)

    def test_three_arrays_in_float32(self) -> None:
        assert self._beside(Layout.of()) == 3 * F32 * WIDE_LOGITS

    def test_four_where_the_vocabulary_is_split(self) -> None:
        titan = replace(EAGER, split_loss_arrays=0)
        assert self._beside(Layout.of(tensor=4), titan) == 4 * F32 * WIDE_LOGITS / 4

    def test_two_where_the_softmax_takes_the_place_of_a_copy(self) -> None:
        assert self._beside(Layout.of(tensor=4)) == 2 * F32 * WIDE_LOGITS / 4

    def test_in_the_type_of_activations_where_nothing_is_in_float32(self) -> None:
        assert self._beside(PURE) == 3 * BF16 * WIDE_LOGITS
        assert self._beside(PURE.replace(master_weights=True)) == 3 * F32 * WIDE_LOGITS

    def test_megatron_has_two_and_a_fused_one_the_cotangents(self) -> None:
        plain = _memory(Layout.of(), WIDE).buffers
        in_place = _memory(Layout.of(), WIDE, replace(EAGER, loss_arrays=2)).buffers
        fused = _memory(Layout.of(), WIDE, replace(EAGER, fused_loss=True)).buffers
        assert plain - in_place == F32 * WIDE_LOGITS
        assert plain - fused == (3 * F32 - BF16) * WIDE_LOGITS

    def test_the_blocks_of_a_layer_stay_beside(self) -> None:
        """The most alive and not kept: q and k before they turn; else x, gate, up and their product."""
        loss = 3 * F32 * WIDE_LOGITS
        assert _memory(Layout.of(), WIDE).buffers == loss + BF16 * TOKENS * (N + K) * H
        assert _memory(Layout.of(remat="full"), WIDE).buffers == loss + BF16 * (BTD + 3 * BTF)


class TestGradients:
    def test_that_replicas_add_up_take_the_room_of_activations_but_for_buckets(self) -> None:
        alone = replace(EAGER, buckets=False)
        assert _memory(Layout.of(data=2), WIDE, alone).gradients == 0
        assert _memory(Layout.of(data=2), WIDE).gradients == BF16 * count_params(WIDE).total
        assert _memory(Layout.of(), WIDE).gradients == 0

    def test_in_a_type_of_their_own_are_always_there(self) -> None:
        wide = Layout.of(gradients_dtype="f32")
        assert _memory(wide, WIDE).gradients == F32 * count_params(WIDE).total

    def test_that_are_scattered_have_their_own(self) -> None:
        params, norms = count_params(WIDE).total, count_params(WIDE).norms
        assert _memory(Layout.of(fsdp=2), WIDE).gradients == BF16 * ((params - norms) // 2 + norms)

    def test_of_several_microbatches_are_there_from_the_first_on(self) -> None:
        assert _memory(Layout.of(microbatches=4), WIDE).gradients == BF16 * count_params(WIDE).total

    def test_all_of_them_meet_few_activations(self) -> None:
        """Of a single token: the end of the backward pass is the peak, with all that is stored."""
        layout = Layout.of(remat="full")
        graph = record_loss(SMALL, layout, PassShape(1, 1, 1))
        few = step_memory(graph, layout, EAGER)
        assert (few.gradients, few.activations) == (BF16 * count_params(SMALL).total, 0)


def test_the_ends_stay_gathered_beside_what_they_arrived_in() -> None:
    """Embedding and head twice, and two layers: 2 (2 V D) + 2 P elements in bf16."""
    by_fsdp, by_data = (_memory(Layout.parse(f"{axis}=16"), WIDE).buffers for axis in ("fsdp", "data"))
    assert by_fsdp - by_data == BF16 * (2 * 2 * 64_000 * D + 2 * LAYER_WEIGHTS)


def test_a_cast_copy_has_no_flat_array_beside_it() -> None:
    """Float32 weights of replicas: embedding and head once in bf16, and two layers."""
    wide, narrow = (_memory(Layout.of(weights_dtype=dtype), WIDE).buffers for dtype in ("f32", "bf16"))
    assert wide - narrow == BF16 * (2 * 64_000 * D + 2 * LAYER_WEIGHTS)


def test_offloaded_activations_wait_on_the_host() -> None:
    kept, sent = _memory(Layout.of()), _memory(Layout.of(offload=True))
    assert sent.host + sent.activations == kept.activations and sent.host > 0


class TestReported:
    """What an allocator shows where there is room: also what a stream still sends."""

    ROOMY = 1e15

    def _held(self, layout: Layout, config: ModelConfig = SMALL, room: float = ROOMY) -> float:
        graph = record(layout, config)
        return reported_bytes(graph, layout, EAGER, room) - step_memory(graph, layout, EAGER).total

    def test_two_sums_a_layer_stay_until_they_are_sent(self) -> None:
        assert self._held(Layout.of(tensor=4, sequence_parallel=True)) == 2 * L * BF16 * BTD
        assert self._held(Layout.of()) == self._held(Layout.of(data=4)) == 0

    def test_of_as_many_layers_as_the_host_is_ahead(self) -> None:
        deep = replace(SMALL, num_layers=46)
        held = self._held(Layout.of(tensor=4, sequence_parallel=True), deep)
        assert held == pytest.approx(2 * 23 * BF16 * BTD)

    def test_only_where_there_is_room_and_pytorch_holds_them(self) -> None:
        layout = Layout.of(tensor=4, sequence_parallel=True)
        graph = record(layout)
        needed = step_memory(graph, layout, EAGER).total
        assert self._held(layout, room=needed + 1) == 1
        assert self._held(layout, room=needed / 2) == 0
        titan = replace(EAGER, holds_sent=False)
        assert reported_bytes(graph, layout, titan, self.ROOMY) == needed

    def test_of_the_first_stage_where_a_program_asks_its_first_rank(self) -> None:
        """A head as wide as the model is deep: the last stage has most."""
        layout = Layout.of(pipe=2, microbatches=2)
        graph = record(layout, WIDE)
        every = replace(EAGER, reports_first_stage=False)
        most = reported_bytes(graph, layout, every, self.ROOMY)
        assert most == step_memory(graph, layout, EAGER).total
        assert most > reported_bytes(graph, layout, EAGER, self.ROOMY)


class TestFlushes:
    """An allocator that runs short gives its blocks back, once a microbatch."""

    SPLIT = Layout.of(tensor=4, sequence_parallel=True, microbatches=8)

    def test_where_what_is_needed_and_what_is_sent_are_more_than_there_is(self) -> None:
        graph = record(self.SPLIT)
        taken = step_memory(graph, self.SPLIT, EAGER).total + 2 * L * BF16 * BTD
        assert flushes(graph, self.SPLIT, EAGER, taken) == 0
        assert flushes(graph, self.SPLIT, EAGER, taken - 1) == 8
        titan = replace(EAGER, holds_sent=False)
        assert flushes(graph, self.SPLIT, titan, taken - 1) == 0

    def test_a_stage_sends_what_its_own_layers_do(self) -> None:
        layout = self.SPLIT.replace(pipe=2)
        graph = record(layout)
        taken = step_memory(graph, layout, EAGER).total + L * BF16 * BTD
        assert flushes(graph, layout, EAGER, taken) == 0
        assert flushes(graph, layout, EAGER, taken - 1) == 8

    def test_each_time_that_the_host_has_run_ahead_again(self) -> None:
        deep = replace(SMALL, num_layers=69)
        assert flushes(record(self.SPLIT, deep), self.SPLIT, EAGER, 1.0) == 8 * 3

    def test_a_program_that_a_compiler_planned_has_no_allocator(self) -> None:
        assert flushes(record(self.SPLIT), self.SPLIT, PROGRAMS["xla"], 1.0) == 0

    def test_a_step_takes_a_flush_longer_for_each(self) -> None:
        """A chip of one byte runs out; one with room for all does not."""
        layout, machine = self.SPLIT, load("h100:4").running("nanotron")
        small, large = (
            StepPricer(
                record(layout), layout, replace(machine, chip=replace(machine.chip, hbm_usable_bytes=size))
            )
            for size in (1, 10**15)
        )
        more = 8 * machine.chip.step.host_flush_seconds
        assert more > 0
        assert small.cost().seconds - large.cost().seconds == pytest.approx(more)


@pytest.mark.parametrize(
    ("fields", "shape", "layout", "masks", "measured"),
    [
        # gpt3_7b_tp4_pp1_memory_speed, on eight H100s; dropout keeps a byte for each output of a block.
        (
            {"num_layers": 32, "d_model": 4096, "d_ff": 16384, "num_heads": 32, "vocab_size": 131_584},
            PassShape(4, 8192, 8192),
            "data=2,tensor=4,microbatches=2",
            2 * 32 * 2 * 8192 * 4096,
            57.1437e9,
        ),
        # gpt3_15b_8t_release: 13.27 GB between steps, so the optimizer is over 16 ranks.
        (
            {"num_layers": 32, "d_model": 6144, "d_ff": 24576, "num_heads": 48, "vocab_size": 256_000},
            PassShape(64, 4096, 4096),
            "data=16,tensor=8,sequence_parallel=true,microbatches=18",
            0,
            28.16e9,
        ),
    ],
)
def test_megatron_takes_what_its_own_tests_measure(
    fields: dict, shape: PassShape, layout: str, masks: int, measured: float
) -> None:
    """Megatron-LM, tests/functional_tests/test_cases/gpt: mem-max-allocated-bytes of the golden values."""
    config = replace(
        SMALL,
        num_kv_heads=8,
        d_head=128,
        positions="learned",
        max_seq_len=shape.query_len,
        norm="layer",
        gated=False,
        **fields,
    )
    parsed = Layout.parse(f"{layout},zero=1,master_weights=true,gradients_dtype=f32")
    found = step_memory(record_loss(config, parsed, shape), parsed, PROGRAMS["megatron-core"]).total
    assert found + masks == pytest.approx(measured, rel=0.03)


def test_reserved_memory_has_an_update_beside_the_activations() -> None:
    """Float32 copies of bf16 gradients, and with lists of tensors an array of a moment's size."""
    layout = Layout.of(master_weights=True, gradients_dtype="bf16")
    graph = record(layout, SMALL)
    runs = replace(EAGER, memory_figure="reserved", reports_first_stage=False)
    params = count_params(SMALL).total
    reserved, listed = (
        reported_bytes(graph, layout, replace(runs, by_tensor_lists=lists), 1e12) for lists in (False, True)
    )
    assert listed - reserved == pytest.approx(1.05 * F32 * params)
    assert reserved > step_memory(graph, layout, runs).total


def test_narrow_operands_are_kept_narrow() -> None:
    """Two copies of each weight in fp8, and the inputs of products in fp8, or next to those of attention."""
    te = PROGRAMS["te"]
    layout = Layout.of(matmul_dtype="fp8")
    wide, narrow = (_memory(one, runs=te) for one in (Layout.of(), layout))
    assert narrow.weights - wide.weights == 2 * L * LAYER_WEIGHTS
    # Both norms' outputs and the activated gate shrink; attention's output is kept twice.
    assert wide.activations - narrow.activations == L * (2 * BTD + BTF - TOKENS * N * H)
    assert _memory(layout, runs=replace(te, casts_weights=True)).weights == wide.weights
