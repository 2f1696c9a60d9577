"""Every architecture recorded: its FLOPs are those that are counted, its collectives those of its layout."""

from collections import Counter

import pytest

from meshwright.cost.collectives import Copies
from meshwright.cost.graph import Graph, Node
from meshwright.cost.memory import saved_bytes
from meshwright.cost.record import record_loss
from meshwright.cost.recorder import PassShape
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import attention_block
from meshwright.models.config import ModelConfig
from meshwright.models.count import forward_flops_per_token
from meshwright.models.presets import load_model

MODELS = [
    "gpt2", "gpt-3-6.7b", "llama-2-7b", "llama-3.1-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "gemma-2-9b",
    "gemma-3-12b", "phi-3-mini", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite",
    "deepseek-v3",
]  # fmt: skip
B, T = 16, 1024


def _record(config: ModelConfig, layout: Layout) -> Graph:
    return record_loss(config, layout, PassShape(B, T, T))


def _nodes(graph: Graph, kind: str) -> list[tuple[float, Node]]:
    return [(segment.count, node) for segment, node in graph.nodes() if node.kind == kind]


def _forward_flops(graph: Graph) -> float:
    return sum(
        count * work.flops
        for kind in ("matmul", "attention")
        for count, node in _nodes(graph, kind)
        for work in node.forward
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", [Layout.of(), Layout.of(fsdp=8), Layout.of(data=4, context=2)], ids=str)
def test_recorded_flops_are_the_counted_ones(name: str, layout: Layout) -> None:
    """No layout repeats a product; a token goes through its k experts, a query sees its window."""
    config = load_model(name)
    recorded = _forward_flops(_record(config, layout)) * layout.mesh.num_devices
    assert recorded == pytest.approx(forward_flops_per_token(config, T) * B * T, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_the_backward_pass_has_two_products_for_each(name: str) -> None:
    for _, node in _nodes(_record(load_model(name), Layout.of(data=2)), "matmul"):
        flops = [sum(w.flops for w in works) for works in (node.forward, node.backward, node.weight_gradient)]
        assert flops[0] == flops[1] == flops[2] > 0


class TestExperts:
    """Mixtral: E = 8, k = 2, D = 4096, M = 14336."""

    CONFIG = load_model("mixtral-8x7b")
    ROWS_BYTES = 2 * B * T * 4096 * 2  # k copies of every token, bf16

    def _all_to_alls(self, layout: Layout) -> list[tuple[str, int]]:
        graph = _record(self.CONFIG, layout)
        return [
            (direction, transfer.gathered_bytes)
            for _, node in graph.nodes()
            for direction in ("forward", "backward")
            for transfer in getattr(node, f"{direction}_transfers")
            if transfer.op == "all_to_all"
        ]

    def test_tokens_go_to_their_experts_and_back_and_so_do_cotangents(self) -> None:
        """Two AllToAlls forward and two backward, of kBTD over the other data ranks (GShard, 2020)."""
        found = self._all_to_alls(Layout.of(data=8, expert=4))
        assert Counter(direction for direction, _ in found) == {"forward": 2, "backward": 2}
        assert {num_bytes for _, num_bytes in found} == {self.ROWS_BYTES // 2}  # over data = 2

    def test_without_expert_parallelism_no_token_moves(self) -> None:
        assert self._all_to_alls(Layout.of(data=8)) == []

    def test_a_token_goes_once_to_a_node_where_the_layout_says_so(self) -> None:
        """Of DeepSeek-V3's 8 experts in 4 of 8 groups: as many copies, all four ways."""
        config = load_model("deepseek-v3")
        for dispatch, copies in (("each", Copies()), ("once", Copies(8, 8, 4))):
            graph = _record(config, Layout.of(data=8, expert=8, dispatch=dispatch))
            sent = [
                transfer.copies
                for _, node in graph.nodes()
                for transfer in (*node.forward_transfers, *node.backward_transfers)
                if transfer.op == "all_to_all"
            ]
            assert sent and set(sent) == {copies}

    def test_tokens_cross_over_expert_nodes_and_rows_travel_within(self) -> None:
        """Of two rows of a token, to random ones of four nodes, 4 (1 - (3/4)^2) = 1.75 cross, four ways."""
        layout = Layout.of(data=8, expert=8, expert_nodes=4, dispatch="once")
        sent = Counter(
            (transfer.axes, transfer.gathered_bytes, transfer.copies)
            for _, node in _record(self.CONFIG, layout).nodes()
            for transfer in (*node.forward_transfers, *node.backward_transfers)
            if (transfer.op, transfer.dtype) == ("all_to_all", "bf16")
        )
        crossing, within = 1.75 / 2 * self.ROWS_BYTES / 2, self.ROWS_BYTES / 4  # over expert, over the nodes
        assert sent == {
            (("expert_nodes",), crossing, Copies()): 4,
            (("expert",), within, Copies()): 4,
        }

    def test_rows_that_were_weighed_before_they_return_are_not_kept(self) -> None:
        """[T, k, D] in bf16, which the gradients of gates read where tokens' own devices weigh them."""
        kept = []
        for dispatch in ("each", "once"):
            layout = Layout.of(data=8, expert=4, dispatch=dispatch)
            [layer] = [segment for segment in _record(self.CONFIG, layout).segments if segment.source]
            kept.append(saved_bytes(layer, "matmuls"))
        assert kept[0] - kept[1] == self.ROWS_BYTES // layout.mesh.num_devices

    def test_an_experts_gradient_is_summed_over_the_other_data_ranks_alone(self) -> None:
        graph = _record(self.CONFIG, Layout.of(data=8, expert=4))
        axes = {
            transfer.axes
            for _, node in graph.nodes()
            if node.name == "expert_in"
            for transfer in node.backward_transfers
        }
        assert axes == {("data",)}

    def test_weights_of_experts_are_divided(self) -> None:
        whole, shared = (
            next(n for _, n in _record(self.CONFIG, layout).nodes() if n.name == "expert_in").inputs
            for layout in (Layout.of(data=8), Layout.of(data=8, expert=8))
        )
        assert whole[-1].bytes_per_device == 8 * shared[-1].bytes_per_device


def test_a_window_hides_what_lies_outside() -> None:
    """Gemma 3: five local layers to a global one; w (1 - w/2T) keys against T/2."""
    graph = record_loss(load_model("gemma-3-12b"), Layout.of(), PassShape(1, 8192, 8192))
    (local, global_) = (node.forward[0].flops for _, node in _nodes(graph, "attention"))
    assert local / global_ == pytest.approx(1024 * (1 - 1024 / 16384) / 4096)
    assert [s.count for s in graph.segments if s.source] == [40, 8]


def test_a_ring_passes_blocks_in_place_of_a_gather() -> None:
    """c - 1 permutes of each block of keys and values; backward of their gradients too (Liu et al., 2023)."""
    config, layout = load_model("llama-3.1-8b"), Layout.of(context=4, context_method="ring")
    layer = next(s for s in _record(config, layout).segments if s.source)
    passed = [
        (t.tensor, t.dtype, t.repeat, direction)
        for node in layer.nodes
        for direction in ("forward", "backward")
        for t in getattr(node, f"{direction}_transfers")
        if t.op == "permute"
    ]
    runs = 3 * (T // 4 // attention_block(T // 4))
    assert sorted(passed) == [
        (tensor, *passes)
        for tensor in ("k", "v")
        for passes in (("bf16", runs, "backward"), ("bf16", runs, "forward"), ("f32", runs, "backward"))
    ]


def test_narrow_products_cast_their_operands() -> None:
    config = load_model("llama-3.1-8b")
    assert not _nodes(_record(config, Layout.of()), "cast")
    graph = _record(config, Layout.of(matmul_dtype="fp8"))
    assert len(_nodes(graph, "cast")) == len(_nodes(graph, "matmul"))


def test_a_second_tensor_axis_divides_work_and_sums_over_it() -> None:
    """x[B, T, D_tensor2] . w[D_tensor2, F_tensor]: a partial sum over tensor2 (2D tensor parallelism)."""
    config = load_model("llama-3.1-8b")
    one, two = (_record(config, layout) for layout in (Layout.of(), Layout.of(tensor=4, tensor2=2)))
    for name in ("wq", "wo", "w_in", "w_out", "unembed"):
        alone, split = (next(n for _, n in graph.nodes() if n.name == name) for graph in (one, two))
        assert split.forward[0].flops == alone.forward[0].flops / 8
    summed = [t.axes for _, n in two.nodes() if n.name == "w_in" for t in n.forward_transfers]
    assert summed == [("tensor2",)]
