"""The layers of a stage: whole, in order, once, and the same for time, memory and the picture."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.pipeline.stages import (
    depth_counts,
    different_stages,
    stage_counts,
    stage_layers,
)
from meshwright.cost.record import record_loss, record_training
from meshwright.cost.recorder import PassShape
from meshwright.cost.state import StageState
from meshwright.cost.step_cost import StepPricer
from meshwright.cost.step_seconds import hop_transfer
from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.pipelines.depths import layers_of_depths
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.presets import load_model
from meshwright.plan.space import Space
from meshwright.plan.train import price

LLAMA = load_model("llama-3.1-405b")


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 8), st.integers(2, 4), st.integers(0, 40))
def test_every_layer_lies_in_one_chunk(schedule: str, half: int, interleave: int, more: int):
    pipe = 2 * half
    chunks = SCHEDULES[schedule].chunks(interleave)
    num_layers = pipe * chunks - 2 + more
    by_depth = layers_of_depths(num_layers, schedule, pipe, interleave)
    assert [layer for layers in by_depth for layer in layers] == list(range(num_layers))
    sizes = [len(layers) for layers in by_depth]
    assert max(sizes) - min(sizes) <= 1
    copies = 2 if schedule == "dualpipe" else 1
    own = [stage_layers(by_depth, schedule, pipe, interleave, stage) for stage in range(pipe)]
    assert sorted(layer for layers in own for layer in layers) == sorted(copies * list(range(num_layers)))
    assert max(map(len, own)) - min(map(len, own)) <= copies
    if schedule != "zb-v" and len(sizes) > 2:  # whose first stage has both the embedding and the head
        assert max(sizes[0], sizes[-1]) <= min(sizes[1:-1])


def test_llama_405b_has_a_layer_a_chunk():
    """Its 126 layers on 16 stages of 8 chunks: none beside the embedding, none beside the head."""
    sizes = [len(layers) for layers in layers_of_depths(126, "interleaved", 16, 8)]
    assert sizes == [0, *[1] * 126, 0]


def graph_of(config, layout: Layout):
    shape = PassShape(8 / layout.schedule.microbatches, 4096, 4096)
    return record_loss(config, layout, shape)


def test_dense_layers_lie_where_they_come():
    """DeepSeek-V3: the first three of 61 layers are dense, and are all on the first of 8 stages."""
    config = load_model("deepseek-v3")
    layout = Layout.of(pipe=8, microbatches=8)
    graph = graph_of(config, layout)
    dense, experts = graph.layers[0], graph.layers[-1]
    counts = stage_counts(graph, "1f1b", 8, 1)
    assert [stage[dense] for stage in counts] == [3, 0, 0, 0, 0, 0, 0, 0]
    assert [stage[experts] for stage in counts] == [4, 8, 8, 8, 8, 8, 7, 7]
    # The second stage has eight layers of experts and holds far more than the first, the embedding included.
    first, second = (StageState(graph, layout, stage).stored.weights for stage in (0, 1))
    assert second > 1.7 * first


def test_windows_keep_their_order():
    """Gemma 3: five local layers, then a global one."""
    graph = graph_of(load_model("gemma-3-27b"), Layout.of(pipe=2, microbatches=8))
    local, far = graph.layers[0], graph.layers[5]
    assert graph.layers[:12] == (*[local] * 5, far) * 2
    by_depth = depth_counts(graph, "1f1b", 2, 1)
    assert [(counts[local], counts[far]) for counts in by_depth] == [(26, 5), (26, 5)]


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_stages_have_all_that_the_graph_has(schedule: str):
    interleave = 3 if schedule == "interleaved" else 1
    graph = graph_of(replace(LLAMA, num_layers=17), Layout.of())
    for counts in (
        depth_counts(graph, schedule, 4, interleave),
        stage_counts(graph, schedule, 4, interleave),
    ):
        # Stages that are alike have a share of the vocabulary each, and so of both ends.
        ends = 4 if SCHEDULES[schedule].spmd else 1
        wanted = [segment.count * (1 if segment.source else ends) for segment in graph.segments]
        assert [sum(one) for one in zip(*counts, strict=True)] == wanted


def test_one_stage_of_each_kind_is_asked_for_its_memory():
    graph = graph_of(LLAMA, Layout.of())
    # The embedding; 16 layers; the head.
    assert different_stages(graph, "1f1b", 8, 1) == [0, 1, 7]
    assert different_stages(graph, "zb-v", 2, 1) == [0, 1]


def test_hops_of_a_step_by_hand():
    """Four stages, 16 microbatches of a sequence of 4,096 tokens, D 4,096, two bytes: 2^25 bytes a hop."""
    config, machine, workload = load_model("llama-3-8b"), catalog.load("h100:8"), Workload(32, 4096)
    layout = Layout.of(pipe=4, data=2, microbatches=16, remat="full")
    pricer = StepPricer(record_training(config, machine, layout, PassShape(2, 4096, 4096)), layout, machine)
    assert hop_transfer(pricer.graph, 4).gathered_bytes == 4 * 2**25
    found = pricer.hops()
    assert (found.forward, found.backward) == (16, 16)
    forward, backward = (
        one
        for one in price(config, machine, workload, layout).cost.collectives
        if one.what == "activations between stages"
    )
    assert (forward.direction, forward.count, backward.direction, backward.count) == (
        "forward",
        16,
        "backward",
        16,
    )
    slowdown = machine.chip.step.slowdown
    assert forward.seconds == pytest.approx(found.seconds * slowdown)
    exposed = min(found.exposed_seconds, found.count * found.seconds) * slowdown
    assert forward.exposed_seconds + backward.exposed_seconds == pytest.approx(exposed)


def test_uneven_interleaving_is_searched():
    workload, machine = Workload(2048, 8192), catalog.load("h100:2048x8")
    space = Space(LLAMA, machine, workload, Layout.of())
    assert ("interleaved", 8) in space.schedules(Layout.of(pipe=16), 32) and (
        "interleaved",
        2,
    ) in space.schedules(Layout.of(pipe=16), 32)


@pytest.mark.parametrize(
    ("schedule", "tables"),
    [
        # By stage: times the table is sent to others, and its gradient; times this is summed over data, and
        # what the update made of it gathered.
        ("1f1b", [(1, 0, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), (0, 1, 1, 0)]),
        ("zb-v", [(0, 0, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)]),
        ("dualpipe", [(1, 0, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), (0, 1, 1, 0)]),
    ],
)
def test_a_tied_table_is_sent_and_summed_once_by_each_stage_that_reads_it(schedule, tables):
    """D 32, F 64, V 64, 8 query and 4 key heads of 8: 12,288 and two norms a layer; 2,048 of the table."""
    config = ModelConfig("tied", 8, 32, 64, 8, 4, 8, 64, 64, tied_embeddings=True)
    layout = Layout.of(pipe=4, data=2, zero=1, microbatches=8, schedule=schedule)
    layout = layout.replace(weights_dtype="f32", compute_dtype="f32")
    machine = catalog.load("h100:8")
    pricer = StepPricer(record_training(config, machine, layout, PassShape(1, 64, 64)), layout, machine)
    # DualPipe's stages have two layers of each direction, and one end the last norm besides.
    layers, norms = (2 * 12288, 4 * 32) if schedule == "dualpipe" else (0, 0)
    last_norm = norms // 4
    for stage, (lent, borrowed, summed, gathered) in enumerate(tables):
        found = pricer.cost(stage).collectives
        sent = {one.what: one.step_bytes / 4 for one in found if one.what.endswith(" between stages")}
        weights = 4 * (layers + lent * 2048 + norms + (last_norm if stage == 3 else 0))
        # Gradients of matrices, once summed, are split over two devices of data.
        gradients = 4 * ((layers + borrowed * 2048) / 2 + norms + (last_norm if stage == 0 else 0))
        assert sent.get("weights between stages", 0) == weights
        assert sent.get("gradients between stages", 0) == gradients
        of_table = [one for one in found if one.tensor == "embed" and one.axes == ("data",)]
        assert sum(one.count for one in of_table if one.what == "gradients") == summed
        assert sum(one.count for one in of_table if one.what == "updated weights") == gathered
