"""A priced step: what hides, what waits, and the published example of LLaMA-2-13B on 4,096 v5p."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cost.recorded import SMALL, moves, record

from meshwright.cost.collectives import collective_seconds
from meshwright.cost.memory import saved_bytes
from meshwright.cost.priced import PricedCollective
from meshwright.cost.record import record_loss, record_training
from meshwright.cost.recorder import PassShape
from meshwright.cost.step_cost import StepCost, StepPricer
from meshwright.cost.transfer_prices import at_step_rates
from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.models.config_tables import MoE
from meshwright.models.count import count_params
from meshwright.models.presets import load_model
from meshwright.notation.mesh import Mesh
from meshwright.programs.efficiency import StepEfficiency
from meshwright.programs.program import PROGRAMS

EIGHT = load("v5e:4x2").ideal()


def _cost(layout: Layout, hardware: Hardware = EIGHT) -> StepCost:
    return StepPricer(record(layout), layout, hardware).cost()


def _with_overlap(overlap: float) -> Hardware:
    return replace(EIGHT, chip=replace(EIGHT.chip, step=StepEfficiency(overlap=overlap)))


LAYOUTS = st.sampled_from(
    [
        Layout.of(data=8),
        Layout.of(fsdp=8),
        Layout.of(data=2, fsdp=4),
        Layout.of(tensor=8, sequence_parallel=True),
        Layout.of(fsdp=2, tensor=4),
        Layout.of(context=4, fsdp=2),
        Layout.of(data=2, fsdp=2, tensor=2),
    ]
)
REMATS = st.sampled_from(["none", "matmuls", "full"])


@given(LAYOUTS, REMATS)
def test_the_transfers_are_those_of_the_graph(layout: Layout, remat: str) -> None:
    """Each once a pass, layers counted L times; besides them the gradient norm alone."""
    layout = layout.replace(remat=remat)
    counts = {segment.name: segment.count for segment in record(layout).segments}
    expected = [(m.transfer.op, m.transfer.tensor, m.direction, counts[m.segment]) for m in moves(layout)]
    found = [(p.op, p.tensor, p.direction, p.count) for p in _cost(layout).collectives]
    of_update = [item for item in found if item[2] == "update"]
    assert sorted(item for item in found if item[2] != "update") == sorted(expected)
    assert of_update == ([("all_reduce", "grad_norm", "update", 1)] if layout.weight_axes else [])


@given(LAYOUTS, REMATS, st.floats(0, 1))
def test_terms_add_up_and_none_is_negative(layout: Layout, remat: str, overlap: float) -> None:
    cost = _cost(layout.replace(remat=remat), _with_overlap(overlap))
    assert cost.seconds == sum(term.seconds for term in cost.terms)
    assert all(term.seconds > 0 for term in cost.terms)
    assert list(cost.terms) == sorted(cost.terms, key=lambda term: -term.seconds)
    assert cost.bound in {"compute", "hbm", "ici"}
    assert all(0 <= planned.exposed <= 1 for planned in cost.collectives)


@given(LAYOUTS, st.floats(0, 1), st.floats(0, 1))
def test_more_overlap_is_never_slower(layout: Layout, one: float, other: float) -> None:
    less, more = sorted((one, other))
    faster, slower = (_cost(layout, _with_overlap(overlap)).seconds for overlap in (more, less))
    assert faster <= slower * (1 + 1e-12)  # sums in another order


@given(LAYOUTS)
def test_activations_wait_and_weights_may_hide(layout: Layout) -> None:
    serial, hidden = _cost(layout, _with_overlap(0)), _cost(layout, _with_overlap(1))
    assert all(planned.exposed == 1 for planned in serial.collectives)
    for planned in hidden.collectives:
        assert planned.exposed == 1 or planned.what in ("weights", "gradients")
    work = [term.seconds for term in serial.terms if term.bound != "ici"]
    assert serial.seconds == pytest.approx(sum(work) + sum(p.seconds * p.count for p in serial.collectives))


@given(LAYOUTS)
def test_a_roofline_takes_the_longer_of_products_and_links(layout: Layout) -> None:
    """In the forward pass, and in the passes after it together; work between products takes no time."""
    layout = layout.replace(remat="none")
    pricer = StepPricer(record(layout), layout, replace(EIGHT, chip=EIGHT.chip.roofline()))
    for forward, *backward in pricer._timed:
        assert forward.work.direction == "forward"
        for passes in ([forward], backward):
            terms = [name.split()[0] for timed in passes for name, _, _ in timed.work.terms]
            assert {*terms} <= {"matmul", "attention"}
            sent = sum(seconds for timed in passes for _, seconds in timed.each)
            work = sum(timed.work.seconds for timed in passes)
            assert sum(timed.seconds for timed in passes) == pytest.approx(max(work, sent))
            exposed = sum(seconds * timed.exposed(each) for timed in passes for each, seconds in timed.each)
            assert exposed == pytest.approx(max(0.0, sent - work))


@pytest.mark.parametrize(("tokens_per_chip", "is_bound"), [(1024, False), (896, False), (768, True)])
def test_fsdp_is_compute_bound_from_the_chapters_tokens_per_chip(
    tokens_per_chip: int, is_bound: bool
) -> None:
    """850 on v5p's three axes, even if the backward pass gathers the weights again."""
    config, machine, layout = load_model("llama-2-13b"), load("v5p:4x4x4"), Layout.of(fsdp=64)
    machine = replace(machine, chip=machine.chip.roofline())
    graph = record_training(config, machine, layout, PassShape(64, tokens_per_chip, tokens_per_chip))
    [layers] = [
        [timed.exposed(each) for timed in passes for each, _ in timed.each if each.what == "weights"]
        for segment, passes in zip(graph.segments, StepPricer(graph, layout, machine)._timed, strict=True)
        if segment.name == "layer"
    ]
    assert layers and any(share > 0.01 for share in layers) == is_bound


def test_microbatches_repeat_the_passes_and_not_the_update() -> None:
    """Nothing hides, so each term is its transfers and work: sums of norms' gradients are of a step."""
    layout, serial = Layout.of(fsdp=8), _with_overlap(0)
    once = _cost(layout, serial)
    four = _cost(layout.replace(microbatches=4), serial)
    optimizer = next(term.seconds for term in once.terms if term.name == "optimizer")
    of_a_step = optimizer + sum(p.seconds * p.count for p in once.collectives if _is_of_a_step(p))
    assert four.seconds == pytest.approx(4 * (once.seconds - of_a_step) + of_a_step)
    assert {p.count for p in four.collectives} == {1, 3, 4, 12}


def _is_of_a_step(planned: PricedCollective) -> bool:
    return (planned.what, planned.op) == ("gradients", "all_reduce") or planned.direction == "update"


def test_replicas_sum_their_gradients_once_a_step() -> None:
    one, four = (_cost(Layout.of(data=8, microbatches=count)) for count in (1, 4))
    counts = [{p.count for p in cost.collectives if p.what == "gradients"} for cost in (one, four)]
    assert counts == [{1, 3}, {1, 3}]


def test_zero_1_scatters_gradients_and_gathers_what_it_updated() -> None:
    """The bytes of an all-reduce (Rajbhandari et al., 2020), in two halves."""
    replicas, shared = (
        _cost(Layout.of(data=8), _with_overlap(0)),
        _cost(Layout.of(data=8, zero=1), _with_overlap(0)),
    )
    ops = {(p.op, p.direction) for p in shared.collectives if p.tensor == "w_in"}
    assert ops == {("reduce_scatter", "backward"), ("all_gather", "update")}
    comms = [
        sum(p.seconds * p.count for p in c.collectives if p.tensor == "w_in") for c in (replicas, shared)
    ]
    # Each has a share of the latency of the message in which it travels with other weights.
    assert comms[0] == pytest.approx(comms[1], rel=0.01)


@pytest.mark.parametrize(("first", "exposed"), [(False, 0.0), (True, 1.0)])
def test_updated_weights_hide_under_the_forward_pass_unless_all_are_gathered_first(
    first: bool, exposed: float
) -> None:
    step = StepEfficiency(gathers_first=first)
    machine = replace(EIGHT, chip=replace(EIGHT.chip, step=step, flops_per_second={"bf16": 1e9}))
    found = _cost(Layout.of(data=8, zero=1), machine).collectives
    gathers = [one for one in found if one.what == "updated weights"]
    assert gathers
    for one in gathers:
        assert one.exposed_seconds == pytest.approx(exposed * one.seconds * one.count)


@pytest.mark.parametrize(("interleave", "passes"), [(1, 1), (2, 2), (4, 3)])
def test_chunks_that_are_sent_one_by_one_hide_under_the_passes_of_the_others(
    interleave: int, passes: int
) -> None:
    """With four stages, under those of 4 (1 - 1 / chunks) microbatches; with one chunk, of one microbatch."""
    schedule = "interleaved" if interleave > 1 else "1f1b"
    layout = Layout.of(pipe=4, data=16, zero=1, microbatches=4, schedule=schedule, interleave=interleave)
    machine = load("h100:8x8")
    graph = record_training(load_model("llama-3-8b"), machine, layout, PassShape(1, 64, 64))

    def hidden_seconds(step: StepEfficiency) -> float:
        priced = replace(machine, chip=replace(machine.chip, step=step))
        collectives = StepPricer(graph, layout, priced).cost().collectives
        once_per_step = [one for one in collectives if one.what in ("updated weights", "gradients")]
        return sum(one.seconds * one.count - one.exposed_seconds for one in once_per_step)

    whole, by_chunks = (hidden_seconds(StepEfficiency(sends_by_chunks=by)) for by in (False, True))
    assert by_chunks == pytest.approx(passes * whole)


@pytest.mark.parametrize(
    ("program", "matmul_dtype", "of_products"),
    [("nemo", "fp8", "fp8"), ("nemo", "fp4", "bf16"), ("nemo", None, "bf16"), ("te", "fp8", "bf16")],
)
def test_programs_that_cast_weights_gather_them_in_8_bits(
    program: str, matmul_dtype: str | None, of_products: str
) -> None:
    """Megatron's fp8_param_gather; the embedding and the head stay wide."""
    machine = replace(load("h100:2x8"), software=PROGRAMS[program])
    layout = Layout.of(data=16, zero=1, matmul_dtype=matmul_dtype)
    graph = record_training(SMALL, machine, layout, PassShape(1, 64, 64))
    gathers = [t for _, node in graph.nodes() for t in node.update_transfers if t.op == "all_gather"]
    dtypes = {transfer.tensor: transfer.dtype for transfer in gathers}
    assert {dtypes[name] for name in ("wq", "wo", "w_in")} == {of_products}
    assert {dtypes[name] for name in ("embed", "unembed")} == {"bf16"}


def test_hosts_launch_collectives_more_slowly_where_stages_are_in_several_nodes() -> None:
    """Each rank of each collective that is waited for adds a second; of pipe=2 within a node nothing."""
    step = StepEfficiency(host_stage_seconds=1.0)

    def held_up(hardware: str, words: str) -> tuple[float, float]:
        machine = load(hardware).ideal()
        machine = replace(machine, chip=replace(machine.chip, step=step))
        layout = Layout.parse(words)
        cost = StepPricer(record(layout), layout, machine).cost()
        critical = {segment.name: 0 for segment in record(layout).segments}
        for move in moves(layout):
            critical[move.segment] += move.transfer.critical * move.transfer.repeat
        told = sum(term.seconds for term in cost.terms if term.name == "host launches")
        counted = sum(runs * n for runs, n in zip(cost.runs, critical.values(), strict=True))
        return told, layout.tensor * counted

    words = "sequence_parallel=true,microbatches=4"
    told, counted = held_up("h100:16", f"pipe=2,tensor=8,{words}")
    assert counted > 0 and told == pytest.approx(counted, rel=1e-3)
    assert held_up("h100:8", f"pipe=2,tensor=4,{words}")[0] == 0.0
    assert held_up("h100:16", f"data=2,tensor=8,{words}")[0] == 0.0


def test_a_step_is_launched_once_a_microbatch() -> None:
    slow = replace(EIGHT, chip=replace(EIGHT.chip, step=StepEfficiency(launch_seconds=0.5)))
    layout = Layout.of(data=8, microbatches=2)
    assert _cost(layout, slow).seconds == pytest.approx(1.0 + _cost(layout).seconds)
    assert _cost(layout, slow).bound == "launch"


def test_slices_are_joined_by_the_data_centre_network() -> None:
    layout = Layout.of(data=2, fsdp=4)
    cost = _cost(layout, load("2*v5e:2x2").ideal())
    assert {p.bound for p in cost.collectives if p.axes == ("data",)} == {"dcn"}
    assert {p.bound for p in cost.collectives if p.axes == ("fsdp",)} == {"ici"}


class TestLlama13B:
    """How to Scale Your Model, "Training", worked example: 3M tokens on v5p 16x16x16, 4,096 chips."""

    NUM_TOKENS, SEQ_LEN = 3_000_000, 4096
    CONFIG = load_model("llama-2-13b")
    HARDWARE = load("v5p:16x16x16").ideal()

    def cost(self, **degrees: int) -> StepCost:
        layout = Layout.of(remat="matmuls").replace(**degrees)
        shape = PassShape(self.NUM_TOKENS / self.SEQ_LEN, self.SEQ_LEN, self.SEQ_LEN)
        graph = record_loss(self.CONFIG, layout, shape)
        return StepPricer(graph, layout, self.HARDWARE).cost()

    def matmul_seconds(self, cost: StepCost) -> float:
        return sum(term.seconds for term in cost.terms if term.name.startswith("matmul"))

    def comms_seconds(self, cost: StepCost) -> float:
        """Of every transfer, hidden or not."""
        return sum(p.seconds * p.count for p in cost.collectives)

    def test_fsdp_is_bound_by_communication(self) -> None:
        """733 tokens a chip where alpha / 3 axes = 850 are needed: comms exceed matmuls by 850/733.

        2%: the embedding is gathered without a matmul. Left out are the all-reduces of norms' scales,
        81 latencies of 48 us.
        """
        cost = self.cost(fsdp=4096)
        needed = 4.59e14 / (2 * 9e10) / 3
        assert needed == pytest.approx(850)
        per_chip = self.NUM_TOKENS / 4096
        weights = [p for p in cost.collectives if p.op != "all_reduce"]
        ratio = sum(p.seconds * p.count for p in weights) / self.matmul_seconds(cost)
        assert ratio == pytest.approx(needed / per_chip, rel=0.02) and ratio > 1

    def test_a_thousand_by_four_communicates_least(self) -> None:
        """X_opt = sqrt(B/F * M_X/M_Y * N) = 1333, of which 1024 x 4 is the nearest mesh."""
        x_opt = (self.NUM_TOKENS / self.CONFIG.d_ff * 2 * 4096) ** 0.5
        assert x_opt == pytest.approx(1333, abs=1)
        meshes = {tensor: self.cost(fsdp=4096 // tensor, tensor=tensor) for tensor in (1, 2, 4, 8, 16)}
        assert min(meshes, key=lambda tensor: self.comms_seconds(meshes[tensor])) == 4

    def test_a_thousand_by_four_is_bound_by_compute(self) -> None:
        """733 tokens a chip are above the threshold of 235: comms that overlap take less than matmuls."""
        cost = self.cost(fsdp=1024, tensor=4)
        assert self.comms_seconds(cost) < self.matmul_seconds(cost)
        assert cost.bound == "compute"

    def test_three_hundred_milliseconds_at_forty_percent(self) -> None:
        """6 x 13e9 x 3e6 FLOPs; 5%: the text rounds 311 ms, and the embedding's look-up is free here."""
        cost = self.cost(fsdp=1024, tensor=4)
        assert self.matmul_seconds(cost) / 0.4 == pytest.approx(0.3, rel=0.05)
        assert cost.seconds < 0.3  # at the peak rate, with all that waits

    def test_every_layout_does_the_same_matmuls(self) -> None:
        assert self.matmul_seconds(self.cost(fsdp=1024, tensor=4)) == pytest.approx(
            self.matmul_seconds(self.cost(data=4096))
        )


def test_the_keys_of_a_transfer() -> None:
    """`mw audit` prints them."""
    planned = _cost(Layout.of(fsdp=8)).collectives[0].to_dict()
    assert planned["op"] == "all_gather" and planned["axes"] == ["fsdp"] and planned["tensor"] == "embed"
    assert {"direction", "bytes", "count", "seconds", "exposed"} <= set(planned)


def _names(model: str, layout: str, hardware: str = "h100:4x8") -> set[str]:
    """What the collectives of a step are called."""
    parsed = Layout.parse(layout)
    shape = PassShape(64 / parsed.schedule.microbatches, 2048, 2048)
    graph = record_loss(load_model(model), parsed, shape)
    return {one.name for one in StepPricer(graph, parsed, load(hardware)).cost().collectives}


class TestNames:
    """What travels is said where it is recorded: a term's name is that and the axes."""

    def test_fsdp_with_tensor(self) -> None:
        assert _names("llama-3-8b", "fsdp=4,tensor=8") == {
            "weights over fsdp",
            "gradients over fsdp",
            "activations over tensor",
            "loss over tensor",
            "loss over fsdp",
            "norm of gradients over fsdp·tensor",
        }

    def test_experts(self) -> None:
        """Tokens to and from their experts, in one microbatch or several."""
        for microbatches in (1, 2):
            names = _names("mixtral-8x7b", f"fsdp=32,expert=8,microbatches={microbatches}")
            assert "tokens over expert" in names
            assert {name for name in names if name.endswith(" over expert")} <= {
                "tokens over expert",
                "weights over expert",
                "gradients over expert",
            }

    @pytest.mark.parametrize("method", ["ring", "allgather"])
    def test_shards_of_a_sequence(self, method: str) -> None:
        names = _names("llama-3-8b", f"fsdp=4,context=8,context_method={method}")
        assert {"keys and values over context", "weights over fsdp"} <= names
        assert "activations over context" not in names

    def test_a_norm_over_a_split_dimension(self) -> None:
        assert "norm statistics over tensor2" in _names("llama-3-8b", "data=4,tensor2=8")

    def test_zero_1(self) -> None:
        assert {"gradients over data", "updated weights over data"} <= _names("llama-3-8b", "data=32,zero=1")

    def test_a_terms_seconds_are_its_collectives(self) -> None:
        cost = _cost(Layout.of(fsdp=2, tensor=4))
        terms = {term.name: term.seconds for term in cost.terms if term.bound == "ici"}
        for name, seconds in terms.items():
            of_it = (one.exposed_seconds for one in cost.collectives if one.name == name)
            assert seconds == pytest.approx(sum(of_it))


def test_a_rings_blocks_count_one_by_one() -> None:
    """Three rounds of keys and values among four devices, two blocks each; backward three more of cotangents.

    Of those each number is a float32.
    """
    found = _cost(Layout.of(context=4, fsdp=2, context_method="ring")).collectives
    passed = [one for one in found if one.what == "keys and values"]
    assert {(one.direction, one.dtype, one.count) for one in passed} == {
        ("forward", "bf16", 3 * 2 * 3), ("backward", "bf16", 3 * 2 * 3), ("backward", "f32", 3 * 2 * 3),
    }  # fmt: skip
    gathered = _cost(Layout.of(context=4, fsdp=2)).collectives
    whole = next(one.gathered_bytes for one in gathered if one.what == "keys and values")
    assert {one.gathered_bytes for one in passed} == {whole // 2, whole}


def test_ulysses_exchanges_queries_keys_values_and_the_result() -> None:
    """Each of V = B T N H (or K) numbers a layer, forward and, of its cotangent, backward."""
    found = _cost(Layout.of(context=4, fsdp=2, context_method="ulysses")).collectives
    exchanged = [one for one in found if one.op == "all_to_all"]
    assert {(one.tensor, one.direction, one.axes) for one in exchanged} == {
        (tensor, direction, ("context",)) for tensor in "qkva" for direction in ("forward", "backward")
    }
    size = {one.tensor: one.gathered_bytes for one in exchanged}
    gathered = _cost(Layout.of(context=4, fsdp=2)).collectives
    keys = next(one.gathered_bytes for one in gathered if one.what == "keys and values")
    assert size["k"] == size["v"] == keys and size["q"] == size["a"]


def test_a_scatter_over_several_dimensions_of_a_torus_is_priced_as_the_sum_that_is_emitted() -> None:
    """XLA:TPU writes an all-reduce and a slice for it: 2 V/(2 W) on a plane, V/W round one ring alone.

    The libtpu of docs/log.md, "A reduce-scatter over all devices". The book's form has one pass, V/(2 W).
    """
    machine = load("v5e:16x16")
    mesh = Mesh({"X": 16, "Y": 16})
    for axes, passes in ((("X", "Y"), 2), (("X",), 1)):
        at_rates = at_step_rates(machine).place(mesh)
        ideal = at_step_rates(machine.ideal()).place(mesh)
        share = machine.chip.step.links["ici"]
        one, other = (
            collective_seconds("reduce_scatter", 1e9, axes, placement).seconds
            for placement in (at_rates, ideal)
        )
        assert one * share == pytest.approx(passes * other)


def _slow_link(bytes_per_second: float) -> Hardware:
    return replace(EIGHT, chip=replace(EIGHT.chip, host_link_bytes_per_second=bytes_per_second))


def test_exchanges_of_tokens_are_waited_for_but_beside_the_pass_of_another_microbatch() -> None:
    """By `exchanging`, not `waiting`; DualPipe joins a forward and a backward pass, under which they hide."""
    config = replace(SMALL, moe=MoE(num_experts=8, experts_per_token=2, d_ff=192))
    step = StepEfficiency(exchanging=0.25, waiting=0.5, matmul={"bf16": 0.01})
    machine = replace(EIGHT, chip=replace(EIGHT.chip, step=step))
    staged = Layout.of(data=4, expert=4, pipe=2, microbatches=4)
    for schedule, least, most in (("1f1b", 0.25, 0.25), ("dualpipe", 0.0, 0.24)):
        layout = staged.replace(schedule=schedule)
        found = StepPricer(record(layout, config), layout, machine).cost().collectives
        sent = [one for one in found if one.op == "all_to_all"]
        assert sent
        shares = [one.exposed_seconds / (one.count * one.seconds) for one in sent]
        assert all(least - 1e-9 <= share <= most + 1e-9 for share in shares)


def test_an_offloaded_optimizer_comes_and_goes_once_an_update() -> None:
    layout = Layout.of(fsdp=8, microbatches=2)
    kept, sent = _cost(layout), _cost(layout.replace(offload_optimizer=True))
    # Eight bytes of moments a parameter, of which each chip has an eighth, there and back.
    expected = 2 * count_params(SMALL).total / EIGHT.chip.host_link_bytes_per_second
    assert sent.seconds - kept.seconds == pytest.approx(expected, rel=0.02)  # vectors are whole on each
    assert [term.bound for term in sent.terms if "host" in term.name] == ["host_link"]


def test_activations_go_to_the_host_beside_compute_and_hold_it_up_where_they_take_longer() -> None:
    layout = Layout.of(fsdp=8)
    fast, slow = 1e15, 1e6
    kept, hidden = (_cost(layout.replace(offload=offload), _slow_link(fast)) for offload in (False, True))
    assert hidden.seconds == kept.seconds
    waits = _cost(layout.replace(offload=True), _slow_link(slow))
    (term,) = [one for one in waits.terms if one.bound == "host_link"]
    of_layers = sum(
        s.count * saved_bytes(s, layout.schedule.remat) for s in record(layout).segments if s.source
    )
    # Written in the forward pass and read in the backward one, but for what they compute meanwhile.
    assert term.seconds == pytest.approx(2 * of_layers / slow, rel=0.01)
    assert waits.bound == "host_link"
