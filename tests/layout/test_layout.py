"""A Layout: which mesh axes split what, the text that names it, and what does not divide."""

import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.layout import REMATS, Layout
from meshwright.layout.contractions import contraction_of
from meshwright.layout.layout_checks import check_fits, layout_for
from meshwright.layout.moves.attention import gathered_keys, token_sharding
from meshwright.layout.moves.experts import sorted_rows
from meshwright.layout.precision import FITS
from meshwright.layout.runnable import why_not
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions, parameters
from meshwright.models.presets import load_model
from meshwright.notation.array import ShardedArray

LLAMA = load_model("llama-3-8b")  # D4096 F14336 N32 K8 H128 V128256
WEIGHTS = ["wq:DNH", "wk:DKH", "wo:NHD", "w_gate:DF", "w_out:FD", "embed:VD", "unembed:DV", "norm:D"]
ACTIVATIONS = ["x:BTD", "q:BTNH", "q:BTKGH", "k:BTKH", "h:BTF", "logits:BTV"]

DEGREES = st.sampled_from([1, 2, 3, 4, 8, 64])
LAYOUTS = st.builds(
    Layout.of,
    data=DEGREES,
    fsdp=DEGREES,
    context=DEGREES,
    tensor=DEGREES,
    sequence_parallel=st.booleans(),
    microbatches=DEGREES,
    remat=st.sampled_from(REMATS),
    weights_dtype=st.sampled_from(["f32", "bf16"]),
    compute_dtype=st.sampled_from(["f32", "bf16"]),
)


def _written(layout: Layout, kind: str, named: list[str]) -> list[str]:
    return [str(getattr(layout, kind)(*item.split(":"))) for item in named]


class TestShardings:
    ALL = Layout.of(data=2, fsdp=2, context=2, tensor=2)

    def test_stored_weights(self) -> None:
        assert _written(self.ALL, "weight", WEIGHTS) == [
            "wq[D_fsdp, N_tensor, H]",
            "wk[D_fsdp, K_tensor, H]",
            "wo[N_tensor, H, D_fsdp]",
            "w_gate[D_fsdp, F_tensor]",
            "w_out[F_tensor, D_fsdp]",
            "embed[V_tensor, D_fsdp]",
            "unembed[D_fsdp, V_tensor]",
            "norm[D]",
        ]

    def test_weights_in_use_are_gathered_over_fsdp(self) -> None:
        specs = {"wq": "BTD,DNH->BTNH", "wo": "BTNH,NHD->BTD", "w_in": "BTD,DF->BTF", "w_out": "BTF,FD->BTD"}
        assert [str(contraction_of(self.ALL, name, spec).rhs_computed) for name, spec in specs.items()] == [
            "wq[D, N_tensor, H]",
            "wo[N_tensor, H, D]",
            "w_in[D, F_tensor]",
            "w_out[F_tensor, D]",
        ]

    def test_activations(self) -> None:
        assert _written(self.ALL, "activation", ACTIVATIONS) == [
            "x[B_{data,fsdp}, T_context, D]",
            "q[B_{data,fsdp}, T_context, N_tensor, H]",
            "q[B_{data,fsdp}, T_context, K_tensor, G, H]",
            "k[B_{data,fsdp}, T_context, K_tensor, H]",
            "h[B_{data,fsdp}, T_context, F_tensor]",
            "logits[B_{data,fsdp}, T_context, V_tensor]",
        ]

    def test_sequence_parallelism_splits_what_tensor_leaves_whole(self) -> None:
        layout = self.ALL.replace(sequence_parallel=True)
        assert _written(layout, "activation", ["x:BTD", "h:BTF"]) == [
            "x[B_{data,fsdp}, T_{context,tensor}, D]",
            "h[B_{data,fsdp}, T_context, F_tensor]",
        ]
        assert str(token_sharding(layout, "tokens")) == "tokens[B_{data,fsdp}, T_context]"

    def test_keys_are_read_whole(self) -> None:
        route = gathered_keys(self.ALL, "k")
        assert str(route.given) == "k[B_{data,fsdp}, T_context, K_tensor, H]"
        assert str(route.used) == "k[B_{data,fsdp}, T, K_tensor, H]"
        assert str(route.yielded) == "dk[B_{data,fsdp}, T, K_tensor, H]{U_context}"

    def test_axes_of_one_device_are_left_out(self) -> None:
        assert _written(Layout.of(), "weight", WEIGHTS[:1]) == ["wq[D, N, H]"]
        assert Layout.of().batch_axes == () and Layout.of(fsdp=2).batch_axes == ("fsdp",)

    def test_a_layers_norm_is_whole_and_its_matrices_are_not(self) -> None:
        assert str(self.ALL.weight("norm", "LD")) == "norm[L, D]"
        assert str(self.ALL.weight("w_in", "LDF")) == "w_in[L, D_fsdp, F_tensor]"

    @given(LAYOUTS)
    def test_no_array_uses_an_axis_twice_or_none_that_is_there(self, layout: Layout) -> None:
        """ShardedArray refuses the first; every weight matrix is split by all of fsdp and tensor."""
        present = {axis for axis in ("fsdp", "tensor") if layout.word(axis) > 1}
        for path, param in parameters(LLAMA).items():
            array = layout.weight(path, param.letters)
            assert set(array.sharded_axes) == (set() if param.init == "ones" else present)
        for item in ACTIVATIONS:
            array = layout.activation(*item.split(":"))
            assert set(layout.batch_axes) <= set(array.sharded_axes)


class TestContractions:
    def _steps(self, layout: Layout, name: str, spec: str) -> list[str]:
        return [str(step) for step in contraction_of(layout, name, spec).steps]

    def test_fsdp_moves_the_weight(self) -> None:
        assert self._steps(Layout.of(fsdp=4), "w_in", "BTD,DF->BTF") == [
            "AllGather_{fsdp} w_in[D_fsdp, F] -> w_in[D, F]"
        ]

    def test_tensor_moves_the_activation_after_the_row_parallel_weight_alone(self) -> None:
        layout = Layout.of(tensor=4)
        assert self._steps(layout, "w_in", "BTD,DF->BTF") == []
        assert self._steps(layout, "w_out", "BTF,FD->BTD") == [
            "AllReduce_{tensor} w_out_out[B, T, D]{U_tensor} -> w_out_out[B, T, D]"
        ]

    def test_sequence_parallelism_gathers_and_scatters(self) -> None:
        layout = Layout.of(tensor=4, sequence_parallel=True)
        assert self._steps(layout, "w_in", "BTD,DF->BTF") == [
            "AllGather_{tensor} x[B, T_tensor, D] -> x[B, T, D]"
        ]
        assert self._steps(layout, "w_out", "BTF,FD->BTD") == [
            "ReduceScatter_{tensor} w_out_out[B, T, D]{U_tensor} -> w_out_out[B, T_tensor, D]"
        ]

    @given(LAYOUTS)
    def test_a_weight_is_only_gathered_over_fsdp(self, layout: Layout) -> None:
        """What is large stays: no contraction moves a weight over tensor, or an activation over fsdp."""
        for name, spec in (("wq", "BTD,DNH->BTNH"), ("wo", "BTNH,NHD->BTD"), ("w_out", "BTF,FD->BTD")):
            plan = contraction_of(layout, name, spec)
            assert {axis for step in plan.rhs_steps for axis in step.axes} <= {"fsdp"}
            moved = {axis for step in (*plan.lhs_steps, *plan.out_steps) for axis in step.axes}
            assert moved <= {"tensor"}


class TestText:
    @given(LAYOUTS)
    def test_a_dictionary_reads_back(self, layout: Layout) -> None:
        assert Layout.from_dict(layout.to_dict()) == layout

    @given(LAYOUTS)
    def test_text_reads_back_but_for_the_dtypes(self, layout: Layout) -> None:
        dtypes = {
            "weights_dtype": layout.precision.weights_dtype,
            "compute_dtype": layout.precision.compute_dtype,
        }
        assert Layout.parse(str(layout)).replace(**dtypes) == layout

    def test_forms(self) -> None:
        assert Layout.parse("") == Layout.parse("data=1") == Layout.of()
        assert Layout.parse(" fsdp = 4 , tensor=2,") == Layout.of(fsdp=4, tensor=2)
        for yes in ("true", "1", "on"):
            assert Layout.parse(f"tensor=2,sequence_parallel={yes}").word("sequence_parallel")
        assert not Layout.parse("sequence_parallel=false").word("sequence_parallel")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("data", "layout: 'data' is not KEY=VALUE; write data=8"),
            ("tensr=2", "layout: 'tensr' is not supported; did you mean tensor or tensor2?"),
            ("tensor=0", "layout: tensor = 0; it must be a positive integer"),
            ("tensor=two", "layout: tensor = 'two'; it must be a positive integer"),
            ("tensor=-2", "layout: tensor = '-2'; it must be a positive integer"),
            ("remat=ful", "layout: remat = 'ful'; did you mean full?"),
            (
                "data=8,sequence_parallel=true",
                "layout: sequence_parallel = true changes nothing with tensor = 1; "
                "fits: tensor or kv_replicas above 1",
            ),
            (
                "data=8,context_method=ring",
                "layout: context_method = ring changes nothing with context = 1; fits: context above 1",
            ),
            (
                "fsdp=8,schedule=lanes",
                "layout: schedule = lanes changes nothing with pipe = 1; fits: pipe above 1",
            ),
            (
                "tensor=8,zero=1",
                "layout: zero = 1 changes nothing with data = 1; fits: data or fsdp or context above 1",
            ),
            (
                "weights_dtype=int3",
                f"layout: weights_dtype = 'int3'; fits: {', '.join(FITS['weights_dtype'])}",
            ),
        ],
    )
    def test_what_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(LayoutError) as caught:
            Layout.parse(text)
        assert str(caught.value) == message

    @pytest.mark.parametrize("word", ["yes", "ture"])
    def test_a_flag_is_true_or_false(self, word: str) -> None:
        with pytest.raises(LayoutError):
            Layout.parse(f"sequence_parallel={word}")

    def test_true_is_no_degree(self) -> None:
        with pytest.raises(LayoutError, match=r"^layout: data = True; it must be a positive integer$"):
            Layout.of(data=True)


class TestWideLayouts:
    """Experts, stages, ZeRO stages and the second tensor axis."""

    def test_experts_are_cut_out_of_the_data_ranks(self) -> None:
        layout = Layout.of(fsdp=8, expert=4, tensor=2)
        assert layout.mesh.sizes == {"data": 1, "fsdp": 2, "expert": 4, "context": 1, "tensor": 2}
        assert _written(layout, "weight", ["w_in:EDM", "wq:DNH", "w_router:DE"]) == [
            "w_in[E_expert, D_fsdp, M_tensor]",
            "wq[D_{fsdp,expert}, N_tensor, H]",
            "w_router[D_{fsdp,expert}, E]",
        ]
        assert str(sorted_rows(layout, "d")) == "d[E, C_{fsdp,expert}, D]"
        assert str(layout.activation("d", "ECD")) == "d[E_expert, C_fsdp, D]"

    def test_more_devices_an_expert_group_than_data_ranks_take_tensor(self) -> None:
        layout = Layout.of(data=32, tensor=2, expert=64, sequence_parallel=True)
        assert layout.table.axes_of("E") == ("expert", "tensor")
        assert str(layout.weight("w_in", "EDM")) == "w_in[E_{expert,tensor}, D, M]"

    def test_a_second_tensor_axis_splits_d(self) -> None:
        layout = Layout.of(tensor2=2, tensor=4)
        assert str(layout.weight("w_in", "DF")) == "w_in[D_tensor2, F_tensor]"
        assert [step.op for step in contraction_of(layout, "w_in", "BTD,DF->BTF").steps] == ["all_reduce"]

    @pytest.mark.parametrize(
        ("zero", "stored", "updated"),
        [
            (1, "w[D, F]", "w[D_fsdp, F]"),
            (2, "w[D, F]", "w[D_fsdp, F]"),
            (None, "w[D_fsdp, F]", "w[D_fsdp, F]"),
        ],
    )
    def test_zero_stages(self, zero: int | None, stored: str, updated: str) -> None:
        layout = Layout.of(data=2, fsdp=4, zero=zero)
        assert (
            str(layout.weight("w", "DF")) == stored and str(layout.rules.updated.weight("w", "DF")) == updated
        )

    def test_zero_over_data_where_there_is_no_fsdp(self) -> None:
        assert str(Layout.of(data=4, zero=1).rules.updated.weight("w", "DF")) == "w[D_data, F]"
        assert str(Layout.of(data=4).rules.updated.weight("w", "DF")) == "w[D, F]"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("data=4,zero=3", "layout: zero = 3 shards the weights; write fsdp=4 for data=4"),
            ("fsdp=4,zero=0", "layout: zero = 0 shards nothing; write data=4 for fsdp=4"),
            ("zero=4", "layout: zero = 4; fits: 0, 1, 2, 3"),
            ("interleave=2", "layout: interleave = 2 chunks a stage with pipe = 1; fits: pipe above 1"),
            (
                "data=4,expert=3",
                "layout: expert = 3 divides neither data = 4 nor fsdp = 1; "
                "fits: expert in {1, 2, 4}, or data=12,expert=3 on 12 devices",
            ),
            (
                "tensor=8,expert=16",
                "layout: expert = 16 divides neither data = 1 nor fsdp = 1; "
                "fits: expert in {1, 8}, or data=16,tensor=8,expert=16 on 128 devices",
            ),
            (
                "data=2,fsdp=2,expert=4",
                "layout: expert = 4 divides neither data = 2 nor fsdp = 2; "
                "fits: expert in {1, 2}, or data=2,fsdp=4,expert=4 on 8 devices",
            ),
            ("schedule=1f1", "layout: schedule = '1f1'; did you mean 1f1b?"),
        ],
    )
    def test_what_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(LayoutError) as caught:
            Layout.parse(text)
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "tensor=8,expert=16",
                "mixtral-8x7b: 8 experts (E) do not divide over expert = 16; fits: expert in {1, 2, 4, 8}",
            ),
            (
                "tensor=16,expert=8",
                "wk[L, D, K_tensor, H]: 8 KV heads (K) do not divide over tensor = 16; fits: tensor in "
                "{1, 2, 4, 8}, or tensor=8,kv_replicas=2, or replicate: wk[L, D, K, H]",
            ),
            (
                "context=16,expert=8",
                "layout: expert = 8 divides neither data = 1 nor fsdp = 1; "
                "fits: expert in {1}, or data=8,context=16,expert=8 on 128 devices",
            ),
        ],
    )
    def test_errors_on_experts_name_degrees_of_the_model(self, text: str, message: str) -> None:
        with pytest.raises(LayoutError) as caught:
            layout_for(load_model("mixtral-8x7b"), text)
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("model", "text"),
        [
            ("llama-3-70b", "fsdp=4,tensor=10"),
            ("llama-3-8b", "tensor=64"),
            ("llama-3-8b", "fsdp=2,tensor=16"),
            ("gemma-3-27b", "tensor=32"),
            ("qwen3-30b-a3b", "tensor=16"),
            ("mixtral-8x7b", "fsdp=2,context=2,expert=8"),
            ("mixtral-8x7b", "data=2,tensor=2,expert=8"),
        ],
    )
    def test_what_an_error_names_fits(self, model: str, text: str) -> None:
        """Every degree and every layout after `fits:` is free of this error, for all arrays of the model."""
        config = load_model(model)
        with pytest.raises(LayoutError) as caught:
            check_fits(Layout.parse(text), config)
        named = re.search(r"fits: (\w+) in \{([^}]+)\}(?:, or ([\w=,]+=\d+))?", str(caught.value))
        assert named
        axis, listed, whole = named.groups()
        for degree in listed.split(", "):
            check_fits(Layout.parse(re.sub(rf"\b{axis}=\d+", f"{axis}={degree}", text)), config)
        if whole:
            check_fits(Layout.parse(whole), config)

    def test_more_chunks_than_layers(self) -> None:
        with pytest.raises(LayoutError) as caught:
            check_fits(Layout.of(pipe=8, interleave=8), LLAMA)
        assert str(caught.value) == (
            "llama-3-8b: 32 layers (L) are fewer than the chunks of pipe·interleave = 8·8 = 64; "
            "fits: interleave up to 4"
        )


class TestCheck:
    def test_tokens_that_go_once_to_a_node_run_where_the_layout_says_which_these_are(self) -> None:
        layout, config = Layout.of(data=8, expert=8, dispatch="once"), load_model("mixtral-8x7b")
        assert why_not(config, layout) == "dispatch=once without expert_nodes"
        assert why_not(config, layout.replace(dispatch="each")) is None
        nodes = layout.replace(expert_nodes=2)
        assert why_not(config, nodes) is None
        assert nodes.mesh.sizes["expert_nodes"] == 2 and nodes.mesh.sizes["expert"] == 4
        assert Layout.parse(str(nodes)) == nodes and Layout.from_dict(nodes.to_dict()).form == nodes.form
        assert str(nodes.weight("w_in", "EDM")) == "w_in[E_{expert_nodes,expert}, D, M]"
        with pytest.raises(
            LayoutError, match=r"expert_nodes = 2, but dispatch = each.*fits: dispatch = once$"
        ):
            check_fits(nodes.replace(dispatch="each"), config)
        with pytest.raises(LayoutError, match=r"expert_nodes = 3 does not divide the 8 devices of an expert"):
            layout.replace(expert_nodes=3)
        with pytest.raises(LayoutError, match=r"grouped = true no row moves between devices; fits: one of"):
            layout.replace(grouped=True)
        with pytest.raises(LayoutError, match=r"has no experts .E. for dispatch = once; leave out dispatch$"):
            check_fits(Layout.of(data=8, dispatch="once"), LLAMA)

    @pytest.mark.parametrize(
        ("layout", "message"),
        [
            (
                Layout.of(tensor=16),
                "wk[L, D, K_tensor, H]: 8 KV heads (K) do not divide over tensor = 16; "
                "fits: tensor in {1, 2, 4, 8}, or tensor=8,kv_replicas=2, or replicate: wk[L, D, K, H]",
            ),
            (
                Layout.of(fsdp=3),
                "embed[V, D_fsdp]: 4096 model dimension (D) do not divide over fsdp = 3; "
                "fits: fsdp in {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048}, "
                "or replicate: embed[V, D]",
            ),
        ],
    )
    def test_a_dimension_that_does_not_divide(self, layout: Layout, message: str) -> None:
        with pytest.raises(LayoutError) as caught:
            check_fits(layout, LLAMA)
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("grouped=true", "llama-3-8b has no experts (E) for grouped = true; leave out grouped"),
            ("capacity=1.25", "llama-3-8b has no experts (E) for capacity = 1.25; leave out capacity"),
            ("data=2,expert=2", "llama-3-8b has no experts (E) for expert = 2; fits: expert in {1}"),
            ("remat=latents", "llama-3-8b has no latents (R) for remat = latents; fits: remat = matmuls"),
        ],
    )
    def test_what_the_model_has_not(self, text: str, message: str) -> None:
        with pytest.raises(LayoutError) as caught:
            check_fits(Layout.parse(text), LLAMA)
        assert str(caught.value) == message
        assert message.startswith(why_not(LLAMA, Layout.parse(text)) or "runs")

    def test_a_batch_that_does_not_divide(self) -> None:
        layout = Layout.of(data=2, fsdp=4, microbatches=2)
        with pytest.raises(LayoutError) as caught:
            check_fits(layout, LLAMA, num_sequences=40)
        assert str(caught.value) == (
            "x[B_{data,fsdp}, T, D]: 40 sequences (B) do not divide over "
            "data·fsdp·microbatches = 2·4·2 = 16; fits: 32 sequences"
        )
        check_fits(layout, LLAMA, num_sequences=32)

    def test_positions_that_do_not_divide(self) -> None:
        layout = Layout.of(context=4, tensor=2, sequence_parallel=True)
        with pytest.raises(LayoutError) as caught:
            check_fits(layout, LLAMA, seq_len=1020)
        assert str(caught.value) == (
            "x[B, T_{context,tensor}, D]: 1020 positions (T) do not divide over 8; fits: 1024 positions"
        )
        check_fits(layout.replace(sequence_parallel=False), LLAMA, seq_len=1020)

    @given(LAYOUTS, st.sampled_from([1, 2, 6, 8]), st.sampled_from([8, 12, 24]))
    def test_what_passes_has_local_shapes(self, layout: Layout, kv_heads: int, d_head: int) -> None:
        """check() refuses exactly the layouts under which some array has no local shape."""
        layout = layout.replace(remat="none")  # remat=latents is refused, too
        config = ModelConfig(
            name="any", num_layers=1, d_model=48, d_ff=96, num_heads=24, num_kv_heads=kv_heads,
            d_head=d_head, vocab_size=192, max_seq_len=64,
        )  # fmt: skip
        sizes = dimensions(config)
        arrays = [layout.weight(path, param.letters) for path, param in parameters(config).items()]
        divides = all(self._divides(array, layout, sizes) for array in arrays)
        if divides:
            check_fits(layout, config)
        else:
            with pytest.raises(LayoutError):
                check_fits(layout, config)

    @staticmethod
    def _divides(array: ShardedArray, layout: Layout, sizes: Mapping[str, int]) -> bool:
        shards = [layout.mesh.size(axes) for axes in array.axes]
        return all(sizes[dim] % count == 0 for dim, count in zip(array.dims, shards, strict=True))


def test_the_mesh_has_every_axis_in_order() -> None:
    layout = Layout.of(data=2, tensor=4)
    assert layout.mesh.sizes == {"data": 2, "fsdp": 1, "context": 1, "tensor": 4}
    assert layout.mesh.axes == ("data", "fsdp", "context", "tensor") and layout.num_batch_shards == 2
    assert layout.weight_axes == ("tensor",) and Layout.of(data=8).weight_axes == ()


def test_the_devices_of_fsdp_may_be_neighbours() -> None:
    layout = Layout.parse("data=2,fsdp=4,tensor=2,inner=fsdp")
    assert [axis for axis, size in layout.mesh.sizes.items() if size > 1] == ["data", "tensor", "fsdp"]
    assert layout.rules == Layout.parse("data=2,fsdp=4,tensor=2").rules
    again = Layout.from_dict(layout.to_dict())
    assert (again, str(again)) == (layout, str(layout))
    assert layout != Layout.parse("data=2,fsdp=4,tensor=2")
    with pytest.raises(LayoutError, match="inner = fsdp changes nothing with tensor = 1"):
        Layout.parse("data=2,fsdp=4,inner=fsdp")


@pytest.mark.parametrize(
    ("text", "phase", "why"),
    [
        (
            "pipe=4,microbatches=4,schedule=lanes",
            "train",
            "layers that differ in their indexer, in a pipeline",
        ),
        ("context=2,context_method=ulysses", "train", "an indexer with heads exchanged for positions"),
        (
            "tensor=4,kv_replicas=2,cache=batch",
            "generate",
            "an indexer that chooses blocks, with the cache split by sequences",
        ),
    ],
)
def test_uses_of_an_indexer_that_do_not_run(text: str, phase: str, why: str) -> None:
    model, layout = load_model("minimax-m3"), Layout.parse(text)
    assert (why_not(model, layout, phase) or "").startswith(why)
    assert why_not(model, Layout.parse("fsdp=4,tensor=4,sequence_parallel=true")) is None
