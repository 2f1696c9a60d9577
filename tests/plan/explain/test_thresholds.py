"""The closed forms: the sources' figures, and the bytes and seconds that the derived algorithm gives.

Figures: How to Scale Your Model, "Training" and "Transformer Math", as corrected by its errata.
"""

from dataclasses import replace

import pytest
from tests.cost.recorded import SMALL, TOKENS, D, F, moves, ring_bytes

from meshwright.cost.priced import PricedCollective
from meshwright.cost.record import record_loss
from meshwright.cost.recorder import PassShape
from meshwright.hardware.catalog import load
from meshwright.hardware.chip import Torus
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.models.presets import load_model
from meshwright.plan.explain.thresholds import (
    BYTES_PER_PARAM,
    Threshold,
    data_parallel_tokens_per_chip,
    links,
    mixed_batch_shards,
    mixed_tokens_per_chip,
    nearest_divisor,
    pipeline_bubble,
    slice_tokens,
    tensor_limit,
    thresholds,
)
from meshwright.plan.train import price

V5P_FLOPS, V5P_LINK = 4.59e14, 2 * 9e10
ALPHA = V5P_FLOPS / V5P_LINK
LLAMA_13B = load_model("llama-2-13b")


def train_seconds(
    num_params: float, num_tokens: float, num_chips: float, flops_per_second: float, mfu: float
) -> float:
    """Seconds of a whole training run: 6 P tokens over the FLOP/s that the chips reach."""
    return 6 * num_params * num_tokens / (num_chips * flops_per_second * mfu)


def named(found: tuple[Threshold, ...]) -> dict[str, Threshold]:
    return {threshold.name: threshold for threshold in found}


class TestFigures:
    def test_alpha_of_a_v5p(self):
        assert pytest.approx(2550) == ALPHA
        assert data_parallel_tokens_per_chip(ALPHA, 1) == pytest.approx(2550)
        assert data_parallel_tokens_per_chip(ALPHA, 3) == pytest.approx(850)

    def test_a_pod_needs_seven_and_a_half_million_tokens(self):
        assert 8960 * data_parallel_tokens_per_chip(ALPHA, 3) == pytest.approx(7.6e6, rel=0.005)

    def test_sixty_four_chips(self):
        """N=64, B=48,000, F=32,768, M_X/M_Y=2: X about 13.7, 16 x 4."""
        x = mixed_batch_shards(48_000, 32_768, 64, 2)
        assert x == pytest.approx(13.7, abs=0.05)
        assert (nearest_divisor(64, x), 64 // nearest_divisor(64, x)) == (16, 4)

    def test_thirteen_billion_on_four_thousand_chips(self):
        """X_opt by B/F, as the errata have it; F/B would give 128."""
        x = mixed_batch_shards(3e6, 13_824, 4096, 2)
        assert x == pytest.approx(1333, abs=1)
        assert nearest_divisor(4096, x) == 1024
        assert mixed_tokens_per_chip(ALPHA, 13_824, 2) == pytest.approx(235, abs=0.5)

    def test_the_mixed_threshold_of_the_text(self):
        """F=32,768 on a 3D mesh: 99 tokens a chip, 8 times below FSDP's; four times that in turn."""
        assert mixed_tokens_per_chip(ALPHA, 32_768, 2) == pytest.approx(99, abs=0.5)
        assert mixed_tokens_per_chip(ALPHA, 32_768, 2, overlapped=False) == pytest.approx(4 * 99.2, abs=0.5)
        assert 850 / mixed_tokens_per_chip(ALPHA, 32_768, 2) == pytest.approx(8, rel=0.1)

    def test_between_slices(self):
        """71,360 with the text's 4.46e14, 73,440 with the chip table's 4.59e14 (erratum 6)."""
        assert slice_tokens(4.46e14, 6.25e9) == pytest.approx(71_360)
        assert slice_tokens(V5P_FLOPS, 6.25e9) == pytest.approx(73_440)

    def test_seventy_billion_in_seventeen_days(self):
        """6.3e24 FLOPs; 16M tokens at 850 a chip are 18,823 chips; 17 days at 50%."""
        flops = 6 * count_params(load_model("llama-3-70b")).total * 15e12
        assert flops == pytest.approx(6.3e24, rel=0.01)
        chips = 16e6 / data_parallel_tokens_per_chip(ALPHA, 3)
        assert chips == pytest.approx(18_823, abs=1)
        assert train_seconds(70e9, 15e12, chips, V5P_FLOPS, 0.5) / 86_400 == pytest.approx(17, abs=0.5)

    def test_a_step_of_thirteen_billion_at_forty_percent(self):
        """300 ms; 3%: the text rounds 6 x 3e6 x 13e9 / (4096 x 4.6e14 x 0.4) = 310 ms."""
        assert train_seconds(13e9, 3e6, 4096, 4.6e14, 0.4) == pytest.approx(0.31, abs=0.005)

    def test_deepseek_v3(self):
        """2.79e6 H800-hours of 1.513e15 FLOP/s for 14.8e12 tokens of 37e9 active parameters: 21.7%.

        The text rounds 3.29e24 FLOPs up to 3.3e24.
        """
        at_the_peak = train_seconds(37e9, 14.8e12, 1, 1.513e15, 1.0)
        assert at_the_peak * 3.3 / 3.2856 / (2.79e6 * 3600) == pytest.approx(0.217, abs=0.0005)

    def test_saved_activations_of_sixteen_million_tokens(self):
        """2 L B (D + 2F): the products of the MLP's three matmuls; 4.2e13 bytes, counted from the graph."""
        workload = Workload(4000, 4000)
        graph_bytes = _mlp_products(workload) * 40
        assert graph_bytes == 2 * 40 * workload.num_tokens * (5120 + 2 * 13_824)
        assert graph_bytes == pytest.approx(4.2e13, rel=0.005)

    def test_megatrons_three_dimensions(self):
        """32 devices = tensor 4 x pipeline 4 x data 2, tensor innermost and stages outermost."""
        layout = Layout.of(tensor=4, pipe=4, data=2)
        assert layout.mesh.num_devices == 32
        assert [axis for axis, size in layout.mesh.sizes.items() if size > 1] == ["pipe", "data", "tensor"]

    @pytest.mark.parametrize(
        ("stages", "microbatches", "chunks"), [(4, 8, 1), (8, 64, 1), (4, 8, 2), (1, 5, 1)]
    )
    def test_bubbles(self, stages: int, microbatches: int, chunks: int):
        """Against a count of slots: the last stage waits p - 1 of v m + p - 1 slots of a chunk."""
        slots = chunks * microbatches + stages - 1
        assert pipeline_bubble(stages, microbatches, chunks) == (stages - 1) / slots


def _mlp_products(workload: Workload) -> int:
    """Bytes of the results of one layer's three MLP matmuls on one device, from the recorded graph."""
    shape = PassShape(workload.num_sequences, workload.seq_len, workload.seq_len)
    graph = record_loss(LLAMA_13B, Layout.of(), shape)
    layer = next(segment for segment in graph.segments if segment.name == "layer")
    products = [node for node in layer.nodes if node.kind == "matmul" and node.name in MLP]
    return sum(value.bytes_per_device for node in products for value in node.outputs)


MLP = ("w_gate", "w_in", "w_out")
# A gated MLP has 3DF weights where the forms count the 2DF of a plain one.
GATED = 1.5
PLAIN = replace(SMALL, gated=False)
EITHER = pytest.mark.parametrize(("config", "weights"), [(PLAIN, 1), (SMALL, GATED)], ids=["plain", "gated"])


def mlp_bytes(config: ModelConfig, layout: Layout, *axes: str) -> dict[str, float]:
    """Bytes round the ring of one layer's MLP over `axes`, forward and backward, as derived.

    The cotangent of the MLP's input is summed under the name of what it flows into.
    """
    of_mlp = [
        move
        for move in moves(layout, config)
        if move.segment == "layer" and move.transfer.axes == axes and _is_mlp(move.transfer.tensor)
    ]
    return {
        "forward": ring_bytes(of_mlp, "forward"),
        "backward": ring_bytes(of_mlp, "recompute", "backward"),
    }


def _is_mlp(tensor: str) -> bool:
    return any(name in tensor for name in MLP)


@EITHER
class TestTheDerivedAlgorithmMovesTheSameBytes:
    """The table of the chapter, a layer, counted from the recorded graph's collectives."""

    def test_data_parallelism(self, config: ModelConfig, weights: float):
        found = mlp_bytes(config, Layout.of(data=8), "data")
        assert found == {"forward": 0, "backward": weights * 8 * D * F}

    def test_fsdp(self, config: ModelConfig, weights: float):
        found = mlp_bytes(config, Layout.of(fsdp=8), "fsdp")
        assert found == {"forward": weights * 4 * D * F, "backward": weights * 8 * D * F}

    def test_tensor_parallelism(self, config: ModelConfig, weights: float):
        found = mlp_bytes(config, Layout.of(tensor=4), "tensor")
        assert found == {"forward": 4 * TOKENS * D, "backward": 4 * TOKENS * D}

    @pytest.mark.parametrize(("x", "y"), [(4, 2), (2, 4)])
    def test_fsdp_with_tensor_parallelism(self, config: ModelConfig, weights: float, x: int, y: int):
        """Each divides the other's bytes; the input's second gather is shared with the first."""
        layout = Layout.of(fsdp=x, tensor=y)
        over_x, over_y = mlp_bytes(config, layout, "fsdp"), mlp_bytes(config, layout, "tensor")
        assert over_x == {"forward": weights * 4 * D * F / y, "backward": weights * 8 * D * F / y}
        assert over_y == {"forward": 4 * TOKENS * D / x, "backward": 4 * TOKENS * D / x}

    def test_sharded_activations_are_gathered_again(self, config: ModelConfig, weights: float):
        """6BD/X backward: dOut and In gathered, dIn scattered, as the text's steps say; its table has 8."""
        layout = Layout.of(fsdp=4, tensor=2, sequence_parallel=True)
        found = mlp_bytes(config, layout, "tensor")
        assert found == {"forward": 4 * TOKENS * D / 4, "backward": 6 * TOKENS * D / 4}


class TestTheDerivedAlgorithmTakesTheSameTime:
    """4,096 v5p with ideal links: bytes over n axes of W, or over M_X and M_Y of them."""

    HARDWARE, WORKLOAD = load("v5p:16x16x16").ideal(), Workload(4096, 1024)
    D, F, TOKENS = 4096, 16_384, 4096 * 1024
    CONFIG = ModelConfig(
        name="round",
        num_layers=4,
        d_model=D,
        d_ff=F,
        num_heads=32,
        num_kv_heads=32,
        d_head=128,
        vocab_size=32_768,
        max_seq_len=1024,
    )

    def seconds(self, axis: str, **degrees: int) -> float:
        """Of one layer's MLP over `axis`, hidden or not; what remat repeats is no part of the forms."""
        layout = Layout.of(remat="full").replace(**degrees)
        transfers = price(self.CONFIG, self.HARDWARE, self.WORKLOAD, layout).cost.collectives
        return sum(p.seconds for p in transfers if p.axes == (axis,) and _of_mlp(p))

    def test_fsdp_over_three_axes(self):
        expected = GATED * 12 * self.D * self.F / (3 * V5P_LINK)
        assert self.seconds("fsdp", fsdp=4096) == pytest.approx(expected)

    def test_data_parallelism_over_three_axes(self):
        expected = GATED * 8 * self.D * self.F / (3 * V5P_LINK)
        assert self.seconds("data", data=4096) == pytest.approx(expected)

    def test_fsdp_over_two_axes_and_tensor_over_one(self):
        weights, activations = (self.seconds(axis, fsdp=256, tensor=16) for axis in ("fsdp", "tensor"))
        assert weights == pytest.approx(GATED * 12 * self.D * self.F / 16 / (2 * V5P_LINK))
        assert activations == pytest.approx(8 * self.TOKENS * self.D / 256 / V5P_LINK)

    def test_fsdps_threshold_is_where_transfers_take_as_long_as_matmuls(self):
        """At 850 tokens a chip FSDP's bytes over three axes last as long as the MLP's 18 BDF FLOPs."""
        ideal = links(self.HARDWARE)
        assert ideal is not None
        tokens = 4096 * data_parallel_tokens_per_chip(ideal.alpha, ideal.num_axes)
        assert self.seconds("fsdp", fsdp=4096) == pytest.approx(self.compute_seconds(tokens))

    def test_tensors_threshold_is_where_transfers_take_as_long_as_matmuls(self):
        """Y = F / alpha: 4BD bytes against 4BDF FLOPs forward, where a gated MLP does 3/2 of the FLOPs."""
        ideal = links(self.HARDWARE)
        assert ideal is not None
        excess = 16 / tensor_limit(ideal.alpha, self.F)
        forward = self.seconds("tensor", fsdp=256, tensor=16) / 2
        assert forward / (self.compute_seconds(self.TOKENS) / 3) == pytest.approx(excess / GATED)

    def test_x_opt_is_where_both_take_the_same_time(self):
        """4DF/(Y M_X W) = 4BD/(X M_Y W), the forward pass of FSDP and of TP at B = F X^2 M_Y/(M_X N)."""
        ideal = links(self.HARDWARE)
        assert ideal is not None
        tokens = self.F * 256**2 / ideal.axes_ratio / 4096
        assert mixed_batch_shards(tokens, self.F, 4096, ideal.axes_ratio) == pytest.approx(256)
        weights = self.seconds("fsdp", fsdp=256, tensor=16) / 3 / GATED
        activations = self.seconds("tensor", fsdp=256, tensor=16) / 2 * tokens / self.TOKENS
        assert weights == pytest.approx(activations)

    def test_the_slices_threshold_is_where_their_sum_lasts_as_long_as_the_backward_pass(self):
        """8DF bytes a slice's chips against 8BDF FLOPs; of two slices each sends half of what many would."""
        hardware, layout = load("2*v5p:4x4x4").ideal(), Layout.of(data=2, fsdp=64, remat="full")
        transfers = price(self.CONFIG, hardware, Workload(128, 1024), layout).cost.collectives
        over_dcn = sum(p.seconds for p in transfers if p.axes == ("data",) and _of_mlp(p))
        dcn = hardware.chip.network
        assert isinstance(dcn, Torus)
        tokens = slice_tokens(V5P_FLOPS, dcn.dcn_bytes_per_second)
        backward = GATED * 8 * tokens * self.D * self.F / 64 / V5P_FLOPS
        assert over_dcn * 2 / (2 - 1) == pytest.approx(backward)

    def compute_seconds(self, tokens: float) -> float:
        """18 BDF of a gated MLP over every chip at its peak."""
        return GATED * 12 * tokens * self.D * self.F / 4096 / V5P_FLOPS


def _of_mlp(planned: PricedCollective) -> bool:
    repeated = planned.direction == "recompute" and planned.what == "activations"
    return not repeated and _is_mlp(planned.tensor)


class TestCases:
    def case(self, model: str, hardware: str, workload: Workload, layout: Layout) -> dict[str, Threshold]:
        return named(thresholds(load_model(model), load(hardware), workload, layout))

    def test_the_worked_example(self):
        """3M tokens: DP does not fit (130 GB > 96), FSDP is bound by ICI (733 < 850), 1024 x 4 by compute."""
        found = self.case("llama-2-13b", "v5p:16x16x16", Workload(3000, 1000), Layout.of(fsdp=1024, tensor=4))
        memory = found["data_parallel_memory"]
        assert not memory.holds
        assert count_params(LLAMA_13B).total * BYTES_PER_PARAM == pytest.approx(130e9, rel=0.002)
        assert "130 GB of weights and moments" in memory.meaning and "a chip has 96 GB" in memory.meaning
        alone = found["data_parallel_tokens_per_chip"]
        assert (round(alone.value), round(alone.limit), alone.holds) == (732, 850, False)
        assert alone.limit * 4096 == pytest.approx(3.48e6, rel=0.001)
        assert found["tensor_degree"].holds and found["tensor_degree"].limit == pytest.approx(5.42, abs=0.01)
        mixed = found["fsdp_with_tensor_degree"]
        assert mixed.limit == pytest.approx(1333, abs=1) and mixed.value == 1024 and mixed.holds is None
        assert "(about fsdp=1024, tensor=4)" in mixed.meaning
        together = found["fsdp_with_tensor_tokens_per_chip"]
        assert together.limit == pytest.approx(235, abs=0.5) and together.holds
        in_turn = found["fsdp_with_tensor_tokens_per_chip_in_turn"]
        assert in_turn.limit == pytest.approx(4 * together.limit) and not in_turn.holds

    def test_memory_bounds_pure_data_parallelism(self):
        """HBM / 10: a v5p holds 9e9 parameters."""
        found = self.case("llama-3-8b", "v5p:4x4x4", Workload(64, 4096), Layout.of(data=64))
        assert found["data_parallel_memory"].limit == pytest.approx(9e9, rel=0.07)
        assert found["data_parallel_memory"].holds

    def test_slices(self):
        found = self.case(
            "llama-3-70b", "2*v5p:16x16x16", Workload(512, 4096), Layout.of(fsdp=1024, tensor=8)
        )
        assert found["tokens_per_slice"].limit == pytest.approx(73_440)
        assert found["tokens_per_slice"].value == 256 * 4096 and found["tokens_per_slice"].holds
        one = self.case("llama-3-70b", "v5p:16x16x16", Workload(512, 4096), Layout.of(fsdp=1024, tensor=4))
        assert "tokens_per_slice" not in one

    def test_the_hint_names_a_degree_that_runs(self):
        """70B on 8,960 chips: the optimum's nearest divisor is 10, which splits neither 8 KV heads nor 64."""
        found = self.case("llama-3-70b", "v5p:16x20x28", Workload(1024, 1024), Layout.of(fsdp=1120, tensor=8))
        hint = "(about fsdp=1120, tensor=8; the batch has 1,024 sequences, so context takes a part of fsdp)"
        assert hint in found["fsdp_with_tensor_degree"].meaning

    def test_gpus(self):
        """989e12 / 450e9 inside a node; between nodes eight cards of 50e9 carry a gathered array."""
        found = self.case(
            "llama-3.1-405b", "h100:2048x8", Workload(2048, 8192), Layout.of(fsdp=2048, tensor=8)
        )
        alone = found["data_parallel_tokens_per_chip"]
        assert alone.limit == pytest.approx(989e12 / 400e9)
        assert found["tensor_degree"].limit == pytest.approx(53_248 * 450e9 / 989e12)
        assert "NVLink joins 8" in found["tensor_degree"].meaning
        assert "(about fsdp=2048, tensor=8)" in found["fsdp_with_tensor_degree"].meaning

    def test_experts_move_for_the_few_that_a_token_uses(self):
        """E / k times the tokens: Mixtral has 8 experts of which a token goes through 2."""
        dense = self.case("llama-3-8b", "v5p:4x4x4", Workload(512, 4096), Layout.of(fsdp=64))
        sparse = self.case("mixtral-8x7b", "v5p:4x4x4", Workload(512, 4096), Layout.of(fsdp=64))
        alone = "data_parallel_tokens_per_chip"
        assert sparse[alone].limit == pytest.approx(4 * dense[alone].limit)
        assert sparse[alone].formula.endswith("E / k")
        assert sparse["tensor_degree"].limit == pytest.approx(2 * dense["tensor_degree"].limit)

    def test_a_pipelines_bubble(self):
        layout = Layout.of(pipe=4, fsdp=16, microbatches=8)
        found = self.case("llama-3-8b", "v5p:4x4x4", Workload(512, 4096), layout)["microbatches"]
        assert "(v m + p - 1), is 27.3%" in found.meaning and (found.limit, found.holds) == (27, False)
        chunks = layout.replace(interleave=4)
        found = self.case("llama-3-8b", "v5p:4x4x4", Workload(512, 4096), chunks)["microbatches"]
        assert "is 8.6%" in found.meaning and (found.limit, found.holds) == (7, True)

    def test_one_node(self):
        ideal = links(load("h100:8"))
        assert ideal is not None and ideal.alpha / ideal.num_axes == pytest.approx(989e12 / 450e9)

    @pytest.mark.parametrize("hardware", ["cpu:8", "h100:1", "v5e:1x1"])
    def test_nothing_is_said_of_links_where_there_are_none(self, hardware: str):
        assert links(load(hardware)) is None

    def test_a_line_has_half_a_ring(self):
        """v5e closes a ring only of 16: 4x4 has two lines, 16x16 two rings."""
        line, ring = links(load("v5e:4x4")), links(load("v5e:16x16"))
        assert line is not None and ring is not None
        assert line.alpha == pytest.approx(2 * ring.alpha)
        assert (line.num_axes, ring.num_axes) == (2, 2)

    def test_float32_moves_twice_the_bytes(self):
        hardware = load("v5p:4x4x4")
        wide, narrow = links(hardware, "f32"), links(hardware, "bf16")
        assert wide is not None and narrow is not None
        assert wide.alpha / narrow.alpha == pytest.approx(
            2 * hardware.chip.flops("f32") / hardware.chip.flops("bf16")
        )


def test_tensor_limit_scales_with_its_axes():
    assert tensor_limit(ALPHA, 32_768) == pytest.approx(12.85, abs=0.01)
    assert tensor_limit(ALPHA, 32_768, 2) == pytest.approx(25.7, abs=0.02)
