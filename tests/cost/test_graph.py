"""What the layout alone says of a step: collectives, FLOPs and what is recomputed, in closed form.

The published rows (How to Scale Your Model, "Training") are per layer of a two-matrix MLP, in bf16,
B its tokens: 8DF for DP, 4DF + 8DF for FSDP, 4BD + 4BD for tensor parallelism. A layer here has P
weights (3DF gated, and 2D(N + K)H of attention) and two blocks, so 2DF becomes P and BD becomes 2 BTD.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cost.recorded import (
    BF16,
    LAYER_WEIGHTS,
    SMALL,
    TOKENS,
    B,
    D,
    F,
    H,
    K,
    L,
    N,
    T,
    V,
    layer_moves,
    moves,
    record,
    ring_bytes,
)

from meshwright.cost.graph import Graph, recomputed_nodes
from meshwright.cost.record import record_loss
from meshwright.cost.recorder import Lowering, PassShape
from meshwright.layout import Layout
from meshwright.models.config import DraftHead
from meshwright.models.count import count_params, train_flops_per_token
from meshwright.models.presets import load_model
from meshwright.platforms import CPU, GPU, TPU, ExpertBlocks

DEGREES = st.sampled_from([1, 2, 4])
LAYOUTS = st.builds(
    Layout.of,
    data=DEGREES,
    fsdp=DEGREES,
    context=DEGREES,
    tensor=DEGREES,
    sequence_parallel=st.booleans(),
    remat=st.sampled_from(["none", "matmuls", "full"]),
)
P_BYTES = BF16 * LAYER_WEIGHTS
X_BYTES = BF16 * TOKENS * D


class TestVolumes:
    """Bytes round the ring for one layer: V for a gather or a scatter, 2 V for an all-reduce."""

    def test_one_device_moves_nothing(self) -> None:
        assert list(moves(Layout.of())) == []

    def test_data_parallel(self) -> None:
        """8DF: every gradient all-reduced, 2 passes x 2 bytes x 2DF; here 2 x 2 x P."""
        found = layer_moves(Layout.of(data=8), "data")
        assert ring_bytes(found, "forward", "recompute") == 0
        assert ring_bytes(found, "backward") == 2 * P_BYTES

    def test_fsdp(self) -> None:
        """4DF + 8DF: gathered forward; gathered again and scattered backward."""
        found = layer_moves(Layout.of(fsdp=8), "fsdp")
        assert ring_bytes(found, "forward") == P_BYTES
        assert ring_bytes(found, "recompute", "backward") == 2 * P_BYTES

    def test_zero_3_moves_half_as_much_again_as_data_parallelism(self) -> None:
        fsdp = layer_moves(Layout.of(fsdp=8), "fsdp")
        data = layer_moves(Layout.of(data=8), "data")
        assert sum(m.ring_bytes for m in fsdp) == 1.5 * sum(m.ring_bytes for m in data)

    def test_tensor_parallel(self) -> None:
        """4BD + 4BD a block, two blocks: BTD all-reduced twice forward and twice backward."""
        found = layer_moves(Layout.of(tensor=4), "tensor")
        assert ring_bytes(found, "forward") == ring_bytes(found, "backward") == 4 * X_BYTES

    def test_sequence_parallel_gathers_the_input_once_more(self) -> None:
        """An all-reduce is the gather and the scatter; the backward pass gathers its input again."""
        found = layer_moves(Layout.of(tensor=4, sequence_parallel=True), "tensor")
        assert ring_bytes(found, "forward") == ring_bytes(found, "backward") == 4 * X_BYTES
        assert ring_bytes(found, "recompute") == 2 * X_BYTES

    def test_fsdp_and_tensor_parallel(self) -> None:
        """(4BD/X + 4DF/Y) + (4BD/X + 8DF/Y): each divides what the other moves.

        The published backward of 8BD/X counts the input's second gather apart.
        """
        layout = Layout.of(fsdp=4, tensor=2)
        weights, activations = layer_moves(layout, "fsdp"), layer_moves(layout, "tensor")
        assert sum(m.ring_bytes for m in weights) == 3 * P_BYTES / 2
        assert sum(m.ring_bytes for m in activations) == 8 * X_BYTES / 4

    def test_data_and_fsdp(self) -> None:
        """The gradient is scattered over fsdp first, so data all-reduces a shard of it."""
        layout = Layout.of(data=2, fsdp=4)
        assert sum(m.ring_bytes for m in layer_moves(layout, "fsdp")) == 3 * P_BYTES
        assert sum(m.ring_bytes for m in layer_moves(layout, "data")) == 2 * P_BYTES / 4

    def test_context_parallel(self) -> None:
        """Keys and values, 2 BTKH, are gathered and their cotangents scattered; gradients are summed."""
        found = layer_moves(Layout.of(context=4), "context")
        kv_bytes = 2 * BF16 * TOKENS * K * H
        assert ring_bytes(found, "forward") == ring_bytes(found, "recompute") == kv_bytes
        assert ring_bytes(found, "backward") == kv_bytes + 2 * P_BYTES


class TestMegatron:
    """One collective forward and one backward for each half of a block (Shoeybi et al., 2019)."""

    def test_all_reduces(self) -> None:
        found = layer_moves(Layout.of(tensor=4), "tensor")
        assert [(m.direction, m.transfer.op) for m in found].count(("forward", "all_reduce")) == 2
        assert [(m.direction, m.transfer.op) for m in found].count(("backward", "all_reduce")) == 2
        assert len(found) == 4
        assert {m.transfer.tensor for m in found if m.direction == "forward"} == {"wo", "w_out"}

    def test_sequence_parallelism_takes_each_apart(self) -> None:
        """Korthikanti et al., 2022: a gather before the first matmul, a scatter after the second."""
        found = layer_moves(Layout.of(tensor=4, sequence_parallel=True), "tensor")
        ops = Counter((m.direction, m.transfer.op) for m in found)
        assert ops == {
            ("forward", "all_gather"): 2,
            ("forward", "reduce_scatter"): 2,
            ("recompute", "all_gather"): 2,
            ("backward", "all_gather"): 2,
            ("backward", "reduce_scatter"): 2,
        }

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_it_waits_for_activations_and_not_for_weights(self, sequence_parallel: bool) -> None:
        layout = Layout.of(fsdp=2, tensor=4, sequence_parallel=sequence_parallel)
        assert all(move.transfer.critical for move in layer_moves(layout, "tensor"))
        assert not any(move.transfer.critical for move in layer_moves(layout, "fsdp"))

    def test_the_logits_are_never_moved(self) -> None:
        """Over a split vocabulary the loss reduces [B, T] floats: maximum, sum and target."""
        found = [
            m.transfer for m in moves(Layout.of(tensor=4)) if m.segment == "head" and m.transfer.critical
        ]
        of_loss = [t for t in found if t.tensor == "loss"]
        assert [(t.op, t.gathered_bytes) for t in of_loss] == [("all_reduce", 4 * TOKENS)] * 3
        assert max(t.gathered_bytes for t in found) < BF16 * TOKENS * V

    def test_the_embedding_sums_the_rows_that_each_device_owns(self) -> None:
        found = [m for m in moves(Layout.of(tensor=4)) if m.segment == "embedding"]
        assert [(m.direction, m.transfer.op) for m in found] == [("forward", "all_reduce")]
        assert found[0].transfer.gathered_bytes == X_BYTES


def test_a_norms_gradient_is_summed_over_all_that_splits_its_input() -> None:
    layout = Layout.of(data=2, tensor=2, sequence_parallel=True)
    found = [m for m in moves(layout) if m.segment == "layer" and "norm" in m.transfer.tensor]
    assert len(found) == 2
    assert all(m.direction == "backward" and set(m.transfer.axes) == {"data", "tensor"} for m in found)


class TestFlops:
    def _flops(self, layout: Layout, kind: str, graph: Graph | None = None) -> dict[str, float]:
        """FLOPs of a step over all devices by direction."""
        totals: dict[str, float] = {"forward": 0.0, "recompute": 0.0, "backward": 0.0}
        for segment in (graph or record(layout)).segments:
            scale = segment.count * layout.mesh.num_devices
            again = recomputed_nodes(segment, layout.schedule.remat)
            for node in segment.nodes:
                if node.kind == kind:
                    forward = sum(work.flops for work in node.forward)
                    backward = sum(work.flops for work in (*node.backward, *node.weight_gradient))
                    totals["forward"] += forward * scale
                    totals["recompute"] += forward * scale * (node in again)
                    totals["backward"] += backward * scale
        return totals

    @given(LAYOUTS.filter(lambda layout: layout.schedule.remat == "none"))
    def test_six_a_parameter_and_token_under_any_layout(self, layout: Layout) -> None:
        """2ND forward, 4ND backward; no layout repeats a matmul. The embedding is a look-up."""
        counts = count_params(SMALL)
        matmul_params = counts.mlp + counts.attention + D * V
        flops = self._flops(layout, "matmul")
        assert flops == {
            "forward": 2 * matmul_params * TOKENS,
            "recompute": 0,
            "backward": 4 * matmul_params * TOKENS,
        }

    @given(LAYOUTS.filter(lambda layout: layout.schedule.remat == "full"))
    def test_full_rematerialisation_repeats_the_forward_pass_of_the_layers(self, layout: Layout) -> None:
        """8ND rather than 6ND, but for w_out: nothing reads its product again."""
        flops = self._flops(layout, "matmul")
        assert flops["recompute"] == 2 * TOKENS * L * (LAYER_WEIGHTS - D * F)

    def test_keeping_matmuls_repeats_none_of_them(self) -> None:
        assert self._flops(Layout.of(remat="matmuls"), "matmul")["recompute"] == 0
        # Attention's output is the result of a matmul too.
        assert self._flops(Layout.of(remat="matmuls"), "attention")["recompute"] == 0
        attention = self._flops(Layout.of(remat="full"), "attention")
        assert attention["recompute"] == attention["forward"] > 0

    def test_attention(self) -> None:
        """Scores and values: 4 B T^2 N H forward, half of it where the mask is skipped."""
        whole = 4 * L * B * T * T * N * H
        dense = self._flops(Layout.of(), "attention", record(Layout.of(), flash_attention=False))
        flash = self._flops(Layout.of(), "attention")
        assert dense["forward"] == whole
        assert flash["forward"] == whole / 2
        assert flash["backward"] == 2.5 * flash["forward"]  # four products of gradients, scores again

    def test_attention_by_blocks(self) -> None:
        """Half of the scores and half a block; each crosses memory in float32 and in bfloat16.

        Of 2,048 tokens a query sees 1,024 + 128 keys in blocks of 256. Forward a score is written, and read
        for the largest and for its exponential, its weight written and read: 3 * 4 + 2 * 2 = 16 bytes; the
        float32 sums [T, H] are read and written with each of 1,152 / 256 = 4.5 blocks.
        Backward 4 * 4 + 5 * 2 = 26 bytes; dQ with each block, dK and dV with each of T / 256 = 8 blocks of
        queries, of which 4.5 / 8 see them.
        """
        length, seen = 2048, 1152
        shape = PassShape(1, length, length)
        by_kernel, by_blocks = (
            record_loss(SMALL, Layout.of(), shape, Lowering(by_blocks=by_blocks))
            for by_blocks in (False, True)
        )
        flops = [self._flops(Layout.of(), "attention", graph) for graph in (by_kernel, by_blocks)]
        assert flops[1]["forward"] == flops[0]["forward"] * seen / 1024
        [softmax] = [node for _, node in by_blocks.nodes() if node.kind == "softmax"]
        scores, queries, keys = N * length * seen, N * length * H, K * length * H
        assert softmax.forward[0].hbm_bytes == 16 * scores + 8 * queries * 4.5
        of_keys = 2 * 4 * 2 * keys * 8 * 4.5 / 8
        assert softmax.backward[0].hbm_bytes == 26 * scores + 8 * queries * 4.5 + of_keys

    def test_kernels_compute_whole_blocks_of_windows(self) -> None:
        """Of a window of 300 tokens in blocks of 256, a block of queries meets three: 768 keys, not 278."""
        windowed, shape = replace(SMALL, sliding_window=300, global_every=0), PassShape(1, 2048, 2048)
        graphs = (
            record_loss(windowed, Layout.of(), shape, Lowering(kernel=kernel)) for kernel in (None, TPU.flash)
        )
        exact, whole = (self._flops(Layout.of(), "attention", graph)["forward"] for graph in graphs)
        assert exact == pytest.approx(4 * L * N * H * 2048 * 300 * (1 - 300 / 4096))
        assert whole == 4 * L * N * H * 2048 * 768

    @given(LAYOUTS)
    def test_attention_is_split_without_repetition(self, layout: Layout) -> None:
        """Shards of a sequence have early and late queries alike: half of the keys each."""
        flops = self._flops(layout, "attention")["forward"]
        assert flops == pytest.approx(4 * L * B * T * T * N * H / 2, rel=1e-12)

    def test_a_tied_model_multiplies_its_table_again(self) -> None:
        tied = replace(SMALL, tied_embeddings=True)
        assert self._flops(Layout.of(), "matmul", record(Layout.of(), tied)) == self._flops(
            Layout.of(), "matmul"
        )

    @pytest.mark.parametrize("draft_head", [None, "joint", "frozen"])
    def test_draft_heads_multiply_as_counted(self, draft_head: DraftHead | None) -> None:
        """A frozen model has no backward pass, and no logits of its own."""
        config = replace(SMALL, draft_head=draft_head)
        flops = self._flops(Layout.of(), "matmul", record(Layout.of(), config))
        assert sum(flops.values()) == TOKENS * train_flops_per_token(config, 0)


class TestRecomputation:
    def _again(self, remat: str, **degrees: int) -> list[str]:
        layout = Layout.of(remat=remat).replace(**degrees)
        layer = next(s for s in record(layout).segments if s.name == "layer")
        return [f"{node.kind} {node.name}" for node in recomputed_nodes(layer, remat)]

    def test_nothing_but_gathers(self) -> None:
        assert self._again("none") == []
        again = self._again("none", fsdp=8)
        assert again == [f"gather {w}" for w in ("wq", "wk", "wv", "wo", "w_gate", "w_in", "w_out")]

    def test_what_stands_between_matmuls(self) -> None:
        assert self._again("matmuls") == [
            "elementwise attention_norm",
            "elementwise rope_q",
            "elementwise rope_k",
            "elementwise attention_residual",
            "elementwise mlp_norm",
            "elementwise w_activation",
        ]

    def test_all_but_what_nothing_reads(self) -> None:
        again = self._again("full")
        assert "matmul w_out" not in again and "elementwise mlp_residual" not in again
        assert [name for name in again if name.startswith("matmul")] == [
            f"matmul {w}" for w in ("wq", "wk", "wv", "wo", "w_gate", "w_in")
        ]

    @given(LAYOUTS)
    def test_the_embedding_and_the_head_run_once(self, layout: Layout) -> None:
        for segment in record(layout).segments:
            if segment.name != "layer":
                assert recomputed_nodes(segment, layout.schedule.remat) == []


@pytest.mark.parametrize(
    ("text", "static_blocks", "rows"),
    [
        # Of 8 x 4096 tokens each chooses 2 of 8 experts, of which a device has one: 8192 rows where all get
        # as much. Where shapes are static a round has room for twice that, of the 32768 tokens of a group.
        ("fsdp=8,expert=8", None, 8192),
        ("fsdp=8,expert=8", GPU.expert_blocks, 16_384),
        # Without an axis of experts a device meets its own tokens alone: 8192 rows, and room for 8 experts'
        # last blocks, on CPUs of 256 rows: (8192 + 8 x 255) / 256 = 39, elsewhere of 512: 23.
        ("fsdp=8", CPU.expert_blocks, 39 * 256),
        ("fsdp=8", TPU.expert_blocks, 23 * 512),
    ],
)
def test_rows_of_experts_have_the_room_of_a_round_and_travel_by_an_even_load(
    text: str, static_blocks: ExpertBlocks | None, rows: int
) -> None:
    config, layout = load_model("mixtral-8x7b"), Layout.parse(text)
    graph = record_loss(config, layout, PassShape(8, 4096, 4096), Lowering(static_blocks=static_blocks))
    nodes = {(node.name, node.kind): node for _, node in graph.nodes()}
    (made,) = nodes["expert_in", "matmul"].outputs
    assert made.bytes_per_device == rows * 14_336 * 2
    product, *copies = nodes["expert_in", "matmul"].forward
    assert product.flops == 2 * 8192 * 4096 * 14_336
    assert product.looped == (static_blocks is not None)
    assert not any(work.looped for work in nodes["wo", "matmul"].forward)
    if static_blocks:
        # A block of 512 rows (256) reads its expert's weight, and adds to a float32 sum that is cast at last.
        num_blocks, num_weights = 8192 / (256 if static_blocks == CPU.expert_blocks else 512), 4096 * 14_336
        once = num_weights * (8 if text == "fsdp=8" else 1)
        rows_moved = 2 * 8192 * (4096 + 14_336)
        (of_weight,) = nodes["expert_in", "matmul"].weight_gradient
        assert product.hbm_bytes == pytest.approx(rows_moved + 2 * num_blocks * num_weights, rel=1e-6)
        # Of four blocks of an expert the gradient is one product: of two, where there are two (fsdp=8).
        num_sums = num_blocks / (2 if (text, static_blocks) == ("fsdp=8", TPU.expert_blocks) else 4)
        # A loop of GPUs writes a product, and reads it before the sum is read and written. It also copies
        # rows, with three kernels a block and seven a sum; one expert's weights it reads in place.
        of_gpus = static_blocks is GPU.expert_blocks
        moved = rows_moved * (3 if of_gpus else 1) + (16 if of_gpus else 8) * num_sums * num_weights
        assert of_weight.hbm_bytes == pytest.approx(moved + (4 + 4 + 2) * once, rel=1e-6)
        assert of_weight.kernels == pytest.approx(product.kernels + 7 * num_sums * of_gpus)
        assert [work.hbm_bytes for work in copies] == pytest.approx([2 * rows_moved] * of_gpus)
        assert [work.kernels for work in copies] == pytest.approx([3 * num_blocks] * of_gpus)
    if "expert" in text:
        (sent,) = nodes["dispatch", "exchange"].forward_transfers
        assert (sent.op, sent.axes) == ("all_to_all", ("expert",))
        assert sent.gathered_bytes == 8 * 8192 * 4096 * 2
        # Every device tells the others how many rows it has for each of 8 experts.
        counts = nodes.get(("dispatch_counts", "exchange"))
        told = [one.gathered_bytes for one in counts.forward_transfers] if counts else []
        assert told == ([8 * 8 * 4] if static_blocks else [])
