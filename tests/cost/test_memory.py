"""Bytes on a chip, item by item, against closed forms in the sizes of the model."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cost.recorded import BF16, LAYER_WEIGHTS, SMALL, TOKENS, B, D, F, H, K, L, N, T, V, record

from meshwright.cost.graph import recomputed_nodes, saved_values
from meshwright.cost.memory import (
    HeldBytes,
    Memory,
    alive_bytes,
    held_bytes,
    saved_bytes,
)
from meshwright.cost.pipeline.stages import stage_of
from meshwright.cost.record import record_loss, record_training
from meshwright.cost.recorder import Lowering, PassShape
from meshwright.cost.state import StageState, Stored
from meshwright.cost.step_memory import stage_memory, step_memory
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.pipelines.pipeline import Alive
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MLA, MoE
from meshwright.models.count import count_params
from meshwright.models.mixers import ShortConvolution
from meshwright.models.presets import load_model
from meshwright.plan.train import price
from meshwright.platforms import CPU, GPU, TPU

BTD, BTV = TOKENS * D, TOKENS * V
SAVED = {  # elements that one layer keeps
    # x, h, x, h; q and a; k and v; gate, up and their product. F = 4D, NH = KH = D makes it 20 BTD.
    "none": 4 * BTD + 2 * TOKENS * N * H + 2 * TOKENS * K * H + 3 * TOKENS * F,
    # x and the results of wq, wk, wv, attention, wo, w_gate and w_in.
    "matmuls": 2 * BTD + 2 * TOKENS * N * H + 2 * TOKENS * K * H + 2 * TOKENS * F,
    # x and the results of wq, wv, attention and w_gate; not of wk, wo and w_in.
    "alternate": BTD + 2 * TOKENS * N * H + TOKENS * K * H + TOKENS * F,
    "full": BTD,
}


# What each product of a layer multiplies for the gradient of its weight: the inputs of wq, wk, wv, wo, w_gate
# and w_in, that of w_out, and the cotangents of what they give.
LEFT = (5 + 2) * BTD + 2 * TOKENS * N * H + 2 * TOKENS * K * H + 3 * TOKENS * F


def _memory(layout: Layout, config: ModelConfig = SMALL) -> Memory:
    return step_memory(record(layout, config), layout)


def _stored(layout: Layout, config: ModelConfig = SMALL, stage: int = 0) -> Stored:
    return StageState(record(layout, config), layout, stage).stored


def _held(**bytes_of: int) -> HeldBytes:
    return HeldBytes(**{**dict.fromkeys(HeldBytes._fields, 0), **bytes_of})


@pytest.mark.parametrize("remat", SAVED)
def test_one_device(remat: str) -> None:
    """bf16 weights and gradients, float32 moments: 12 bytes a parameter; 10 without gradients."""
    params, memory = count_params(SMALL).total, _memory(Layout.of(remat=remat))
    assert memory.weights == memory.gradients == 2 * params
    assert memory.optimizer == 8 * params
    # The head keeps its input, the norm of it, and the logits.
    assert memory.activations == BF16 * (L * SAVED[remat] + 2 * BTD + BTV)
    assert memory.total == sum(
        (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.buffers)
    )


def test_latents_are_kept_and_not_what_is_made_of_them() -> None:
    """Queries of J + A numbers, keys of J, values of O for each head (DeepSeek-V3, 2024, section 3.2.3)."""
    mla = MLA(kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6, q_rank=24)
    config = replace(SMALL, num_kv_heads=N, d_head=12, mla=mla)
    matmuls, latents = (_memory(Layout.of(remat=remat), config) for remat in ("matmuls", "latents"))
    assert matmuls.activations - latents.activations == BF16 * L * TOKENS * N * ((8 + 4) + 8 + 6)
    graph = record(Layout.of(), config)
    [layer] = [segment for segment in graph.segments if segment.source]
    again = {node.name for node in recomputed_nodes(layer, "latents")} - {
        node.name for node in recomputed_nodes(layer, "matmuls")
    }
    assert again == {"wq_up", "wk_up", "wv_up"}


@pytest.mark.parametrize(("scales", "each"), [(None, 1), ("tiles", -(-D // 128))])
def test_what_products_and_gates_read_may_be_kept_in_a_byte(scales: str | None, each: int) -> None:
    """Nothing recomputed: two normed inputs, gate, up and their product, with float32 scales; not x, q, k, v,
    and not what wo reads, since attention's backward pass does as well.
    """
    words = {"matmul_dtype": "fp8", "matmul_scales": scales}
    wide, narrow = (_memory(Layout.of(saved_dtype=kept, **words)).activations for kept in (None, "fp8"))
    of_f = -(-F // 128) if scales else 1
    of_layers = 2 * BTD + 3 * TOKENS * F - 4 * TOKENS * (2 * each + 3 * of_f)
    of_head = BTD - 4 * TOKENS * each  # the normed input of the head
    assert wide - narrow == L * of_layers + of_head


def test_an_input_that_is_moved_is_kept_in_a_byte_where_it_was() -> None:
    """Of positions that tensor=2 splits a device has half of the normed inputs, and all of the head's."""
    layouts = (
        Layout.of(tensor=2, sequence_parallel=True, matmul_dtype="fp8", saved_dtype=kept)
        for kept in (None, "fp8")
    )
    wide, narrow = (_memory(layout).activations for layout in layouts)
    of_layers = (2 * BTD + 3 * TOKENS * F) // 2 - 4 * TOKENS * (2 // 2 + 3)
    assert wide - narrow == L * of_layers + BTD - 4 * TOKENS


def test_float32_doubles_weights_and_keeps_the_moments() -> None:
    params, memory = count_params(SMALL).total, _memory(Layout.of(weights_dtype="f32"))
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * params, 4 * params, 8 * params)


def test_the_published_twenty_and_one() -> None:
    """About 20 BTD a layer without rematerialisation where F = 4D and NH = KH = D; 1 for block inputs."""
    sizes = {"B": TOKENS, "D": 64}
    wide = ModelConfig(
        name="wide", num_layers=1, d_model=64, d_ff=256, num_heads=4, num_kv_heads=4, d_head=16,
        vocab_size=64, max_seq_len=128,
    )  # fmt: skip
    for remat, count in (("none", 20), ("full", 1)):
        layer = next(s for s in record(Layout.of(remat=remat), wide).segments if s.source)
        saved = sum(value.bytes_per_device for value in saved_values(layer, remat))
        assert saved == count * BF16 * sizes["B"] * sizes["D"]


@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_matrices_are_divided_and_norms_are_not(axis: str) -> None:
    counts = count_params(SMALL)
    assert _stored(Layout.parse(f"{axis}=4")).weights == (counts.total - counts.norms) / 4 + counts.norms


@pytest.mark.parametrize("axis", ["data", "context"])
def test_replicas_are_whole(axis: str) -> None:
    assert _stored(Layout.parse(f"{axis}=4")).weights == count_params(SMALL).total


def test_a_shard_that_does_not_divide_rounds_up() -> None:
    """64 rows over 3 chips: one holds 22."""
    norms = count_params(SMALL).norms
    matrices = count_params(SMALL).total - norms
    assert _stored(Layout.of(fsdp=3)).weights == matrices // 64 * 22 + norms


@pytest.mark.parametrize("remat", SAVED)
def test_activations_are_divided_by_what_splits_them(remat: str) -> None:
    alone = _memory(Layout.of(remat=remat)).activations
    for degrees in ({"data": 4}, {"fsdp": 4}, {"data": 2, "fsdp": 2}):
        assert _memory(Layout.of(remat=remat).replace(**degrees)).activations == alone / 4, degrees


def test_sequence_parallelism_divides_the_residual_stream_too() -> None:
    """Tensor parallelism leaves the four BTD of a layer whole (Korthikanti et al., 2022)."""
    whole = _memory(Layout.of()).activations
    tensor = _memory(Layout.of(tensor=4)).activations
    assert tensor == BF16 * (L * (SAVED["none"] - 4 * BTD) / 4 + L * 4 * BTD + 2 * BTD + BTV / 4)
    # What is gathered is gathered again; the head's norm feeds a gathered copy that is kept.
    split = _memory(Layout.of(tensor=4, sequence_parallel=True)).activations
    assert whole / 4 <= split < tensor
    layer_share = BF16 * L * SAVED["none"] / 4
    assert split - layer_share <= BF16 * (2 * BTD + BTV / 4)


class TestBuffers:
    def test_a_weight_that_stays_where_it_is_takes_none(self) -> None:
        assert _memory(Layout.of(data=8)).buffers < _memory(Layout.of(fsdp=8)).buffers

    def test_a_layers_gathered_weights_lie_beside_its_activations(self) -> None:
        """Until each has been read by the backward pass: at most P, and the feed-forward's at least."""
        by_data, by_fsdp = (_memory(Layout.parse(f"{axis}=16,remat=full")) for axis in ("data", "fsdp"))
        assert BF16 * 3 * D * F <= by_fsdp.buffers - by_data.buffers <= BF16 * (LAYER_WEIGHTS + D * V)

    def test_float32_weights_are_copied_to_the_compute_dtype(self) -> None:
        assert _memory(Layout.of(weights_dtype="f32")).buffers > _memory(Layout.of()).buffers

    def test_a_large_vocabulary_peaks_in_the_head(self) -> None:
        """The logits are activations; beside them is the gradient of their weight, before any other's."""
        wide = replace(SMALL, num_layers=1, vocab_size=64_000)
        memory = _memory(Layout.of(remat="full"), wide)
        assert memory.activations >= BF16 * TOKENS * 64_000
        assert memory.buffers + memory.gradients >= BF16 * D * 64_000
        gathered = _memory(Layout.of(fsdp=4, remat="full"), wide)
        assert gathered.buffers + gathered.gradients >= BF16 * 2 * D * 64_000

    def test_the_head_has_the_room_of_gradients_that_come_after_it(self) -> None:
        """Those of one microbatch, which are no buffers if it is the only one."""
        held = _held(layer=10, head=25)
        assert [held.buffers(gradients, 1, 0, apart=True) for gradients in (0, 5, 20)] == [25, 20, 10]
        assert [held.buffers(gradients, 4, 0, apart=True) for gradients in (0, 5, 20)] == [25, 25, 30]
        assert [held.buffers(gradients, 4, 0, apart=False) for gradients in (0, 5, 20)] == [25, 25, 25]

    def test_what_of_the_head_waits_for_the_layers(self) -> None:
        """Its saved values on GPUs; on TPUs the gradient of its weight alone, for which they make way."""
        graphs = (replace(record(Layout.of()), head_waits=waits) for waits in (True, False))
        put_off, first = (held_bytes(graph, (1, 3, 1), "none") for graph in graphs)
        assert put_off.waits == 0 and first.waits == BF16 * D * V - first.once < 0

    def test_logits_make_way_for_gradients(self) -> None:
        """Of plain data parallelism on TPUs: at the peak there are the gradients, and no logits any more."""
        graph = replace(record(Layout.of(data=4)), head_waits=False)
        memory = step_memory(graph, Layout.of(data=4))
        assert memory.buffers >= 0 and memory.activations > 0
        assert memory.total <= step_memory(record(Layout.of(data=4)), Layout.of(data=4)).total

    def test_a_table_larger_than_all_activations_peaks_at_its_gradient(self) -> None:
        """As it is scattered and as it is reduced, and the head's beside: 2 x 40 + 30 - 50 kept."""
        assert _held(layer=10, head_gradient=30, table=40).buffers(0, 1, 50, apart=True) == 60

    def test_what_a_backward_pass_has_alive(self) -> None:
        """At w_out's turn: gate, up, their product and its cotangent, w_out's gradient, and what waits.

        That is h, q, k, v, a, x and h, and a cotangent for each input of the last sum. q and k before they
        are turned are not read again.
        """
        layer = next(one for one in record(Layout.of(remat="full")).segments if one.source)
        found = held_bytes(record(Layout.of(remat="full")), (1, 3, 1), "full").layer
        alive = 3 * BTD + TOKENS * (2 * N + 2 * K) * H + 4 * TOKENS * F + D * F + 2 * BTD
        assert layer.count == L and found == BF16 * alive

    def test_heads_are_padded_to_the_tiles_of_a_kernel(self) -> None:
        """Of 16 elements to 128: what attention keeps takes eight times as much, all else the same."""
        shape = PassShape(B, T, T)
        plain, tiled = (record_loss(SMALL, Layout.of(), shape, Lowering(head_tile=tile)) for tile in (1, 128))
        more = step_memory(tiled, Layout.of()).activations - step_memory(plain, Layout.of()).activations
        assert more == BF16 * L * 7 * TOKENS * 2 * (N + K) * H
        moved = [sum(v.bytes_per_device for _, n in g.nodes() for v in n.outputs) for g in (plain, tiled)]
        assert moved[0] == moved[1]


@given(
    st.builds(
        Layout.of,
        data=st.integers(1, 8),
        fsdp=st.integers(1, 8),
        context=st.integers(1, 8),
        tensor=st.integers(1, 8),
        sequence_parallel=st.booleans(),
        remat=st.sampled_from(list(SAVED)),
        weights_dtype=st.sampled_from(["f32", "bf16"]),
    )
)
def test_no_item_is_ever_negative(layout: Layout) -> None:
    items = _memory(layout).to_dict()
    assert all(num_bytes > 0 for num_bytes in items.values()), items
    assert items["total"] == sum(num_bytes for name, num_bytes in items.items() if name != "total")


@given(st.builds(Layout.of, fsdp=st.sampled_from([1, 2, 4]), tensor=st.sampled_from([1, 2, 4])))
def test_saving_less_takes_less(layout: Layout) -> None:
    saved = [_memory(layout.replace(remat=remat)).activations for remat in SAVED]
    assert saved == sorted(saved, reverse=True)


def test_update_work() -> None:
    """Adam in bf16 with float32 moments: 2 + 8 + 2 bytes read, 2 + 8 written; 19 operations."""
    params = count_params(SMALL).total
    work, wide = (
        StageState(record(one), one).update_work() for one in (Layout.of(), Layout.of(weights_dtype="f32"))
    )
    assert (work.flops, work.hbm_bytes) == (19 * params, 22 * params)
    assert wide.hbm_bytes == 28 * params


def test_an_optimizer_with_less_state_takes_less() -> None:
    """Lion keeps one moment of AdamW's two; Muon one of the layers' matrices and two of the rest."""
    counts = count_params(SMALL)
    vectors = counts.norms
    matrices = counts.mlp + counts.attention
    found = {name: _memory(Layout.of(optimizer=name)).optimizer for name in ("adamw", "lion", "muon")}
    assert found == {
        "adamw": 8 * counts.total,
        "lion": 4 * counts.total,
        "muon": 4 * matrices + 8 * (counts.vocab + vectors),
    }
    adam, muon = (
        StageState(record(one), one).update_work() for one in (Layout.of(), Layout.of(optimizer="muon"))
    )
    assert muon.hbm_bytes < adam.hbm_bytes and muon.flops > adam.flops


@pytest.mark.parametrize(("zero", "shares"), [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))])
def test_zero_stages_share_one_thing_more_each(zero: int, shares: tuple[int, int, int]) -> None:
    """Matrices over 4 ranks: weights, gradients, optimizer (Rajbhandari et al., 2020, figure 1)."""
    counts = count_params(SMALL)
    layout = Layout.of(fsdp=4) if zero == 3 else Layout.of(data=4, zero=zero)
    stored = _stored(layout)
    assert (stored.weights, stored.gradients, stored.updated) == tuple(
        (counts.total - counts.norms) // share + counts.norms for share in shares
    )


def test_stages_hold_their_layers_and_the_ends_the_vocabulary() -> None:
    first, last = (_stored(Layout.of(pipe=3), stage=stage).weights for stage in (0, 2))
    assert first == LAYER_WEIGHTS + 2 * D + V * D and last == first + D


def test_a_v_ends_where_it_begins() -> None:
    """The first stage of ZB-V has embedding and head, weights and logits; the last its layer alone."""
    v = Layout.of(pipe=3, schedule="zb-v", microbatches=3)
    first, last = (_stored(v, stage=stage).weights for stage in (0, 2))
    assert first == LAYER_WEIGHTS + 2 * D + 2 * V * D + D and last == LAYER_WEIGHTS + 2 * D
    # Three chunks of one layer, half of it each, as F saved them, and four of which W is due; of the head its
    # input, the norm of it, and the logits.
    chunks = 3 * SAVED["none"] // 2 + 4 * LEFT // 2
    assert _memory(v).activations == BF16 * (chunks + 2 * BTD + BTV)
    assert _memory(v).optimizer - _memory(v.replace(schedule="zb-h1")).optimizer == 8 * V * D


@pytest.mark.parametrize("remat", SAVED)
def test_a_split_backward_pass_leaves_what_gradients_of_weights_are_made_of(remat: str) -> None:
    """Of three stages of ZB-H1 the second has, while its second B runs, two microbatches as F saved them and
    two of which W is due; before the W of the first it has one and two.
    """
    layout = Layout.of(pipe=3, schedule="zb-h1", microbatches=6, remat=remat)
    graph = record(layout, SMALL)
    stage = stage_of(graph, layout, 1)
    assert stage.alive == (Alive(2, 2),)
    assert stage_memory(graph, layout, stage).activations == BF16 * (2 * SAVED[remat] + 2 * LEFT + BTD)


def test_both_directions_of_a_dualpipe_have_ends_on_both_end_stages() -> None:
    """Two copies of the model on four stages: the layers of two, and at either end both tables."""
    config = replace(SMALL, num_layers=4)
    both = Layout.of(pipe=4, schedule="dualpipe", microbatches=8)
    shares = [_stored(both, config, stage).weights for stage in range(4)]
    layers = 2 * (LAYER_WEIGHTS + 2 * D)
    assert shares == [layers + 2 * V * D + D, layers, layers, layers + 2 * V * D + D]


def test_what_is_offloaded_waits_on_the_host() -> None:
    kept, sent = _memory(Layout.of()), _memory(Layout.of(offload=True))
    assert sent.host + sent.activations == kept.activations and sent.host > 0
    assert kept.host == 0 and "host" not in kept.to_dict()


def test_of_lanes_the_ring_waits_on_the_host() -> None:
    """2p - 1 microbatches of each stage's layers; the two that go there and come back are on the chip."""

    def memory(pipe: int, *, offload: bool) -> Memory:
        layout = Layout.of(pipe=pipe, microbatches=8, schedule="lanes", offload=offload)
        return _memory(layout, replace(SMALL, num_layers=2 * pipe))

    kept, sent = memory(2, offload=False), memory(2, offload=True)
    assert sent.host + sent.activations == kept.activations and sent.host > 0
    assert memory(4, offload=True).host * 3 == sent.host * 7


def test_the_optimizers_state_and_master_copy_wait_on_the_host() -> None:
    plain = Layout.of(master_weights=True)
    kept, sent = _memory(plain), _memory(plain.replace(offload_optimizer=True))
    weights = count_params(SMALL).total
    assert (sent.optimizer, sent.host) == (0, (8 + 4) * weights)
    assert kept.total - sent.total == sent.host
    assert _memory(Layout.of(offload=True, offload_optimizer=True)).host == (
        8 * weights + _memory(Layout.of(offload=True)).host
    )


def test_llama_2_13b_does_not_fit_under_data_parallelism() -> None:
    """130 GB at 10 bytes a parameter (How to Scale Your Model, "Training"); gradients make 156 of 96."""
    config, layout = load_model("llama-2-13b"), Layout.of(data=4096)
    memory = step_memory(record(layout, config), layout)
    assert memory.weights + memory.optimizer == pytest.approx(130e9, rel=0.01)
    assert memory.weights + memory.optimizer + memory.gradients == pytest.approx(156e9, rel=0.01)


def test_every_stage_of_lanes_holds_its_layers_and_its_share_of_the_vocabulary() -> None:
    """Half of everything, but for the last norm, which both stages have."""
    deep = replace(SMALL, num_layers=4)
    found = _stored(Layout.of(pipe=2, data=2, microbatches=4, schedule="lanes"), deep)
    half = (count_params(deep).total - D) // 2 + D
    assert (found.weights, found.gradients, found.updated) == (half, half, half)


def test_gradients_of_one_microbatch_are_reduced_to_the_shards_of_the_optimizer() -> None:
    """ZeRO 1: each is scattered where it is made. Several microbatches add up whole ones first."""
    one, several = (_memory(Layout.of(data=8, zero=1, microbatches=m)) for m in (1, 2))
    counts = count_params(SMALL)
    assert one.gradients == BF16 * ((counts.total - counts.norms) // 8 + counts.norms)
    assert several.gradients == BF16 * counts.total


def test_rows_of_experts_are_made_beside_what_they_are_made_of() -> None:
    """Gate, up and their product, and the cotangents of all three: six arrays of rows x F.

    The product waits for the gradient of the weight that reads it, as XLA for 8 H100s has it.
    """
    num_rows, width, layout = 1 << 14, 1 << 12, Layout.of(remat="full")
    moe = MoE(num_experts=4, experts_per_token=1, d_ff=width)
    graph = record_loss(replace(SMALL, moe=moe), layout, PassShape(1, num_rows, num_rows), Lowering())
    one = 2 * num_rows * width
    assert 6 * one < step_memory(graph, layout).buffers < 6.2 * one


@pytest.mark.parametrize(("text", "sharded"), [("fsdp=8,expert=8", 8), ("fsdp=16,expert=8", 16)])
def test_further_passes_of_experts_keep_the_first_ones_gradients(text: str, sharded: int) -> None:
    """A layer's slice of its experts' weights, their gradients of the first pass, and the sums: each in bf16.

    Two layers of Mixtral on 8 v5p: nine arrays of 117 MB at the peak (libtpu 0.0.42).
    """
    config, lowering = load_model("mixtral-8x7b"), Lowering(static_blocks=TPU.expert_blocks)
    graph = record_loss(config, Layout.parse(text), PassShape(16, 4096, 4096), lowering)
    experts = 3 * 8 * 4096 * 14_336
    assert sum(node.carried for node in graph.segments[1].nodes) == 3 * BF16 * experts / sharded


def test_only_compilers_that_hide_collectives_compute_the_heads_gradient_before_passes() -> None:
    """Logits of 128 MB; XLA for CPU keeps them during the layers' backward passes."""
    config = replace(load_model("mixtral-8x7b"), num_layers=2, d_model=256, vocab_size=1 << 15)
    lowering, layout = Lowering(static_blocks=GPU.expert_blocks), Layout.parse("fsdp=8,expert=8,remat=full")
    waits = []
    for asynchronous in (True, False):
        graph = record_loss(config, layout, PassShape(8, 2048, 2048), lowering)
        counts = tuple(segment.count for segment in graph.segments)
        waits.append(held_bytes(replace(graph, asynchronous=asynchronous), counts, "full").waits)
    assert waits[1] == 0 and waits[0] < -BF16 * 2048 * (1 << 15) / 2


def test_experts_without_an_axis_take_one_pass() -> None:
    lowering = Lowering(static_blocks=GPU.expert_blocks)
    graph = record_loss(
        load_model("mixtral-8x7b"), Layout.parse("fsdp=8"), PassShape(8, 4096, 4096), lowering
    )
    assert not any(node.carried for _, node in graph.nodes())


_MATRIX = Path(__file__).parents[2] / "benchmarks/results/audit_matrix.json"


def _trained() -> Iterator[Any]:
    for case in json.loads(_MATRIX.read_text())["cases"]:
        if case["phase"] == "train" and case.get("memory_bytes"):
            yield pytest.param(case, id="-".join((case["model"], case["hardware"], case["layout"])))


@pytest.mark.parametrize("case", list(_trained()))
def test_the_compilers_take_about_as_much(case: dict) -> None:
    """Within 15% of what XLA for TPUs and GPUs assigned to the steps of the matrix of audits."""
    workload, whole = Workload(case["num_sequences"], case["seq_len"]), load_model(case["model"])
    model = replace(whole, num_layers=case.get("num_layers") or whole.num_layers)
    planned = price(model, load(case["hardware"]), workload, Layout.parse(case["layout"]))
    assert 1 / 1.15 <= case["memory_bytes"] / planned.memory.total <= 1.15, planned.memory


def test_tpus_keep_the_gradient_of_capped_logits_next_to_them() -> None:
    """The larger is counted: this gradient, or the gradient of the head's weight and the losses."""
    layout, shape = Layout.of(fsdp=8), PassShape(8 * TOKENS, 4, 4)
    plain, capped = (
        held_bytes(graph, tuple(segment.count for segment in graph.segments), "none").head
        for graph in (
            record_training(replace(SMALL, logit_softcap=cap), load("v5p:2x2x2"), layout, shape)
            for cap in (None, 30.0)
        )
    )
    losses = 4 * (4 * TOKENS)
    assert capped - plain == BF16 * (4 * TOKENS * V - V * D) - losses > 0


def test_tpus_keep_whole_sums_of_layers_outside_of_loops() -> None:
    """Of the only layer with attention, over a whole slice; three layers with a state run in a loop."""
    mixers = ("state", "state", "state", "attention")
    config = replace(SMALL, num_layers=4, short_convolution=ShortConvolution(), mixers=mixers)
    layout = Layout.of(fsdp=8, remat="full")
    of_slice = record_training(config, load("v5p:2x2x2"), layout, PassShape(8, 2, 2))
    of_part = record_training(config, load("v5p:2x2x4"), layout.replace(data=2), PassShape(16, 2, 2))
    in_loop, alone = of_slice.layers[0], of_slice.layers[3]
    kept = [segment.whole_sums for segment in of_slice.segments]
    assert kept[alone] == BF16 * LAYER_WEIGHTS * 7 // 8
    assert sum(kept) == kept[alone]
    assert not any(segment.whole_sums for segment in of_part.segments)
    whole, parts = (
        held_bytes(graph, tuple(segment.count for segment in graph.segments), "full")
        for graph in (of_slice, of_part)
    )
    of_loop, of_alone = (alive_bytes(of_slice.segments[one], "full") for one in (in_loop, alone))
    assert whole.layer == max(of_loop + kept[alone], of_alone) > parts.layer == max(of_loop, of_alone)


def test_gpus_copy_gathered_weights_of_experts_outside_of_loops() -> None:
    """Of the only layer with experts, until its values are recomputed; only the loop gathers ahead."""
    moe = MoE(num_experts=8, experts_per_token=1, d_ff=4 * F, num_dense_layers=2)
    config, layout = replace(SMALL, moe=moe), Layout.of(fsdp=8, remat="full")
    graph = record_training(config, load("h100:1x8"), layout, PassShape(8, 8, 8))
    weights = BF16 * 8 * 3 * D * moe.d_ff
    held, in_place = (
        held_bytes(one, tuple(segment.count for segment in graph.segments), "full")
        for one in (graph, replace(graph, copies_experts=False, memo={}))
    )
    assert 2 * weights < held.layer < 2.2 * weights  # and rows of experts
    assert weights < in_place.layer < 1.6 * weights  # a gradient is a third of them
    assert held.ahead == in_place.ahead < weights / 8
    # The only layer with experts runs outside of the loop, so that nothing is gathered ahead beside it.
    in_loop = alive_bytes(graph.segments[graph.layers[1]], "full") + held.ahead
    assert in_loop < held.layer == held.in_loop


def test_gpus_hold_a_layer_more_whose_weights_are_gathered_ahead() -> None:
    """While the head runs: its saved values, the gathered weights of a layer, and the gradients."""
    sharded, whole = (
        record_training(SMALL, load("h100:1x8"), layout, PassShape(8, 512, 512))
        for layout in (Layout.of(fsdp=8), Layout.of(data=8))
    )
    layers, *_ = (one for one in sharded.segments if one.source)
    gathered = BF16 * LAYER_WEIGHTS
    assert held_bytes(sharded, (1, 3, 1), "none").ahead == saved_bytes(layers, "none") + gathered
    assert held_bytes(whole, (1, 3, 1), "none").ahead == 0
    assert _held(layer=10, head=30, ahead=5).buffers(20, 1, 0, apart=True) == 35
    assert _held(layer=40, in_loop=45, head=30, ahead=5).buffers(0, 1, 0, apart=True) == 45
    assert _held(layer=10, head=30).buffers(20, 1, 0, apart=True) == 10


def test_on_cpus_what_the_only_layer_of_a_stack_recomputes_waits_as_if_saved() -> None:
    """XLA for CPU runs that right after the forward pass; the layers of a loop wait for their cotangent."""
    layout, shape = Layout.of(remat="full"), PassShape(2, 16, 16)
    for num_layers, policy in ((1, "none"), (2, "full")):
        config = replace(SMALL, num_layers=num_layers)
        memory = step_memory(record_training(config, load("cpu:1"), layout, shape), layout)
        plain = record_loss(config, layout, shape, Lowering(by_blocks=True, head_tokens=CPU.head_tokens))
        layers, *_ = (one for one in plain.segments if one.source)
        more = saved_bytes(layers, policy) - saved_bytes(layers, "full")
        assert memory.activations == step_memory(plain, layout).activations + num_layers * more
