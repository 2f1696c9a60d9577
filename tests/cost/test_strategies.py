"""Strategies against the chapter's problems, closed forms, and the price of every choice of roles."""

from itertools import product
from math import inf, prod

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.notation.devices import shardings

from meshwright.cost.reshard_seconds import sent_bytes
from meshwright.cost.strategies import REACH, Pricing, strategies
from meshwright.cost.strategy import ContractionQuestion, Objective, Strategy
from meshwright.errors import NotationError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import Einsum
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array, parse_mesh, parse_sizes

V5E_FLOPS, V5E_HBM, V5E_RING, V5E_LINE = 1.97e14, 8.1e11, 9e10, 4.5e10
RING = {"mesh": "X=16", "hardware": "v5e:1x16"}  # sixteen in a row close to a ring


def rated(spec: str) -> Hardware:
    """A machine at its ratings; a host as it is, which overlaps nothing."""
    machine = catalog.load(spec)
    return machine if machine.chip.kind == "cpu" else machine.ideal()


def ask(
    lhs: str, rhs: str, out: str | None, sizes: str, *, mesh: str, hardware: str, dtype: str = "bf16"
) -> ContractionQuestion:
    """The product of the arrays, its letters theirs; without `out`, letters in both are summed."""
    a, b, c = parse_array(lhs), parse_array(rhs), out and parse_array(out)
    kept = c.dims if c else [d for d in (*a.dims, *b.dims) if (d in a.dims) != (d in b.dims)]
    einsum = Einsum("".join(a.dims), "".join(b.dims), "".join(kept))
    return ContractionQuestion(
        einsum, a, b, c or None, parse_mesh(mesh), parse_sizes(sizes), rated(hardware), dtype
    )


def named(found: list[Strategy], name: str) -> Strategy:
    (one,) = [strategy for strategy in found if strategy.name == name]
    return one


# The problems of "Sharded Matrices". Its figures leave HBM out; here the product is the longer of both.


@pytest.mark.parametrize(("batch", "d"), [(256, 8192), (1024, 8192), (8192, 8192), (4096, 4096)])
def test_problem_4_gather_or_reduce(batch: int, d: int) -> None:
    """X[B, D] . Y[D_X, F]: gathering moves 2DF bytes, contracting 4BF, so the latter wins for D > 2B."""
    f = 32768
    q = ask("X[B, D]", "Y[D_X, F]", "Z[B, F]", f"B={batch},D={d},F={f}", **RING)
    found = strategies(q)
    gather, reduce = named(found, "gather Y over X"), named(found, "contract over X, AllReduce")
    assert gather.flops_per_device == 2 * batch * d * f == 16 * reduce.flops_per_device
    assert gather.seconds_comms == pytest.approx(2 * d * f / V5E_RING)
    assert reduce.seconds_comms == pytest.approx(4 * batch * f / V5E_RING)
    assert (reduce.seconds_comms < gather.seconds_comms) == (d > 2 * batch)
    assert gather.seconds_pipelined == pytest.approx(max(gather.seconds_compute, 2 * d * f / V5E_RING))


def test_problem_4_a_third_way_that_the_text_leaves_out() -> None:
    """An AllToAll takes X from D to F of the weights for DF/2 bytes; then 2BF are gathered, not 4BF."""
    q = ask("X[B, D]", "Y[D_X, F]", "Z[B, F]", "B=4096,D=4096,F=32768", **RING)
    found = strategies(q)
    exchange = named(found, "AllToAll Y into F over X, gather Z over X")
    assert exchange.seconds_comms == pytest.approx((2 * 4096 * 32768 / 4 + 2 * 4096 * 32768) / V5E_RING)
    assert exchange.seconds_comms < named(found, "contract over X, AllReduce").seconds_comms
    assert found[0].seconds <= exchange.seconds


def test_problem_5_least_latency() -> None:
    """Over all shardings of the inputs: all three axes on kept letters, and one gather over all three."""
    best: Strategy | None = None
    for b, d, f in (
        ("_XYZ", "", ""),
        ("", "_XYZ", ""),
        ("", "", "_XYZ"),
        ("_XY", "_Z", ""),
        ("_X", "", "_YZ"),
    ):
        q = ask(
            f"A[B{b}, D{d}]", f"W[D{d}, F{f}]", "C[B, F]", "B=8192,D=8192,F=8192",
            mesh="X=4,Y=4,Z=4", hardware="v5p:4x4x4",
        )  # fmt: skip
        one = strategies(q)[0]
        best = one if best is None or one.seconds < best.seconds else best
    assert best is not None
    assert best.flops_per_device == 2 * 8192**3 / 64
    assert best.seconds_comms == pytest.approx(2 * 8192**2 / (3 * 1.8e11))
    assert [step.collective.op for step in best.steps] == ["all_gather"]
    assert set(best.contraction.product.sharded_axes) == {"X", "Y", "Z"}


def test_problem_6_an_all_reduce_over_lines() -> None:
    """A 4x4 slice of v5e has no rings: V (n - 1)/n over one direction, where the text takes V over both."""
    i, j, k = 4096, 8192, 4096
    q = ask("A[I_X, J_Y]", "B[J_Y, K]", "C[I_X, K]", f"I={i},J={j},K={k}", mesh="X=4,Y=4", hardware="v5e:4x4")
    one = named(strategies(q), "contract over Y, AllReduce")
    assert one.flops_per_device == 2 * i * j * k / 16
    assert one.seconds_compute == pytest.approx(2 * i * j * k / 16 / V5E_FLOPS)
    assert one.seconds_comms == pytest.approx(2 * (2 * i * k / 4) * (3 / 4) / V5E_LINE)
    assert one.seconds == pytest.approx(one.seconds_compute + one.seconds_comms)


def test_problem_7_a_block_in_little_memory() -> None:
    """Two weights of 537 MB on four chips of 300 MB: 134 MB of each stay, none can be gathered.

    F on both axes needs no collective for the first product and reduces 2BD bytes after the second.
    A hundred and twenty-eight rows do not fill the matrix units: HBM sets both products.
    """
    sizes, place = "B=128,D=8192,F=32768", {"mesh": "X=2,Y=2", "hardware": "v5e:2x2"}
    weight = 8192 * 32768 * 2 // 4
    left = 300e6 - weight  # the other weight stays
    question = ask("x[B, D]", "w[D, F_XY]", "h[B, F_XY]", sizes, **place)
    first = strategies(question, memory_limit_bytes=left)[0]
    assert first.name == "multiply in place" and first.seconds_comms == 0
    assert first.seconds_compute == pytest.approx((weight + 2 * 128 * 8192 + 2 * 128 * 8192) / V5E_HBM)
    assert first.seconds_compute > first.flops_per_device / V5E_FLOPS
    second = ask("h[B, F_XY]", "v[F_XY, D]", "y[B, D_XY]", sizes, **place)
    found = strategies(second, memory_limit_bytes=left)
    summed = named(found, "contract over X·Y, ReduceScatter into D")
    assert summed.seconds_comms == pytest.approx(2 * 128 * 8192 * (3 / 4) / (2 * V5E_LINE))
    assert found[0].fits(left) and found[0].contraction.product.unreduced == ("X", "Y")
    gathered = [one for one in found if "gather v over X·Y" in one.name]
    assert all(not one.fits(left) for one in gathered)


def test_problem_9_gather_first_or_scatter_after() -> None:
    """A[N, M_X] . B[M, K] -> C[N, K_X]: the collectives of the two ways are as M to K."""
    n, m, k = 4096, 8192, 2048
    found = strategies(ask("A[N, M_X]", "B[M, K]", "C[N, K_X]", f"N={n},M={m},K={k}", **RING))
    gathered = named(found, "gather A over X")
    scattered = named(found, "contract over X, ReduceScatter into K")
    assert gathered.seconds_comms / scattered.seconds_comms == pytest.approx(m / k)
    assert scattered.seconds_comms == pytest.approx(2 * n * k / V5E_RING)


# Windows, memory, objectives, open outputs.


@pytest.mark.parametrize(("i", "k"), [(512, 65536), (16384, 1024)])
def test_a_windowed_gather(i: int, k: int) -> None:
    """t = max(product, transfer + product / n); two blocks are held instead of the whole."""
    q = ask("A[I, J_X]", "B[J, K]", "C[I, K_X]", f"I={i},J=8192,K={k}", **RING)
    found = [one for one in every_strategy(q) if dict(one.roles) == {"X": "K"}]
    plain, windowed = named(found, "gather A over X"), named(found, "gather A over X (windowed)")
    compute, transfer = plain.seconds_compute, plain.seconds_comms
    assert plain.seconds == pytest.approx(compute + transfer)
    assert windowed.seconds == pytest.approx(max(compute, transfer + compute / 16))
    a, b, c = (2 * n for n in (i * 8192, 8192 * k, i * k))
    assert plain.bytes_per_device == a / 16 + b + a + b / 16 + c / 16
    assert windowed.bytes_per_device == a / 16 + b + 2 * a / 16 + b / 16 + c / 16


def test_a_windowed_scatter_holds_no_whole_product() -> None:
    q = ask("A[I, J_X]", "B[J_X, K]", "C[I, K_X]", "I=8192,J=8192,K=8192", **RING)
    found = strategies(q)
    plain = named(found, "contract over X, ReduceScatter into K")
    windowed = named(found, "contract over X, ReduceScatter into K (windowed)")
    whole = 2 * 8192 * 8192
    assert plain.bytes_per_device == 2 * whole / 16 + whole + whole / 16
    assert windowed.bytes_per_device == 2 * whole / 16 + 2 * whole / 16
    assert [step.windowed for step in windowed.steps] == [True]


def test_hardware_that_overlaps_nothing_gains_nothing_from_a_window() -> None:
    q = ask("A[I, J_X]", "B[J, K]", "C[I, K]", "I=512,J=512,K=512", mesh="X=8", hardware="cpu:8")
    assert q.hardware.chip.overlap < 1
    for one in strategies(q):
        together = one.seconds_compute + one.seconds_comms
        assert one.seconds >= together - q.hardware.chip.overlap * min(one.seconds_compute, one.seconds_comms)


def test_an_all_reduce_can_be_scattered_under_the_product_and_then_gathered() -> None:
    q = ask("A[I, J_X]", "B[J_X, K]", "C[I, K]", "I=8192,J=65536,K=8192", **RING)
    one = named(strategies(q), "contract over X, ReduceScatter into I (windowed), gather C over X")
    assert str(one.via) == "C[I_X, K]"
    assert [step.collective.op for step in one.steps] == ["reduce_scatter", "all_gather"]
    assert one.seconds_comms == pytest.approx(
        named(strategies(q), "contract over X, AllReduce").seconds_comms
    )


def test_an_open_output_finishes_its_sums_and_lists_the_deferred_ones() -> None:
    found = strategies(ask("A[I, J_X]", "B[J_X, K]", None, "I=4096,J=4096,K=4096", **RING))
    outs = {str(one.out) for one in found}
    assert outs == {"C[I_X, K]", "C[I, K_X]", "C[I, K]", "C[I, K]{U_X}"}
    assert not found[0].leaves_partial_sum and found[-1].leaves_partial_sum
    assert found[-1].name == "contract over X, leave the sum partial" and found[-1].seconds_comms == 0


def test_a_wanted_partial_sum_is_deferred() -> None:
    one = strategies(ask("A[I, J_X]", "B[J_X, K]", "C[I, K]{U_X}", "I=4096,J=4096,K=4096", **RING))[0]
    assert one.seconds_comms == 0 and not one.leaves_partial_sum


def test_throughput_and_latency_may_disagree() -> None:
    """Repeating the product costs nothing where its collectives overlap and it is short."""
    for objective in ("latency", "throughput"):
        q = ask("A[I_X, J]", "B[J, K_X]", "C[I, K]", "I=1024,J=16384,K=1024", **RING)
        found = strategies(q, objective=objective)
        times = [one.objective_seconds(objective) for one in found]
        assert times == sorted(times)


def test_a_memory_limit_moves_what_does_not_fit_to_the_end() -> None:
    q = ask("A[I_X, J]", "B[J_X, K]", "C[I_X, K]", "I=1024,J=4096,K=4096", mesh="X=4,Y=2", hardware="v5e:4x2")
    free = strategies(q)[0]
    limit = free.bytes_per_device - 1
    found = strategies(q, memory_limit_bytes=limit)
    assert found[0].fits(limit)
    assert found[0].seconds >= free.seconds
    assert [one.fits(limit) for one in found] == sorted((one.fits(limit) for one in found), reverse=True)


def test_a_reshard_that_overlaps_is_kept_next_to_one_that_takes_as_long() -> None:
    """One scatter over two axes takes as long as a scatter over each, but all of it overlaps the product."""
    arrays, sizes = ("A[I_XY, J]", "B[J_XY, K]", "C[I_Y, K_X]"), "I=32,J=32,K=32"
    best = strategies(ask(*arrays, sizes, mesh="X=4,Y=2", hardware="v5e:4x2"), memory_limit_bytes=2688)[0]
    assert [str(step) for step in best.reshards[2].steps] == [
        "ReduceScatter_{Y,X} C[I, K]{U_XY} -> C[I_Y, K_X]"
    ]
    assert best.window == "out" and best.fits(2688)
    assert best.seconds == pytest.approx(best.seconds_comms, rel=1e-4)


# Against the price of every choice of roles.

MACHINES = [
    ("X=4,Y=2", "v5e:4x2"),
    ("X=2,Y=2,Z=2", "v5p:2x2x2"),
    ("X=2,Y=8", "h100:2x8"),
    ("X=4,Y=2", "cpu:8"),
]
SPECS = [("IJ", "JK", "IK"), ("BIJ", "BJK", "BIK"), ("IJM", "MJK", "IK"), ("IJ", "JKL", "ILK")]


@st.composite
def questions(draw: st.DrawFn) -> ContractionQuestion:
    mesh_text, hardware = draw(st.sampled_from(MACHINES))
    lhs, rhs, out = draw(st.sampled_from(SPECS))
    mesh = parse_mesh(mesh_text)
    a, b, c = (draw(shardings(mesh, dims, name)) for dims, name in ((lhs, "A"), (rhs, "B"), (out, "C")))
    wanted = draw(st.sampled_from([c, None]))
    sizes = {letter: 2 ** draw(st.integers(5, 13)) for letter in lhs + rhs}
    return ContractionQuestion(Einsum(lhs, rhs, out), a, b, wanted, mesh, sizes, rated(hardware), "bf16")


def every_strategy(q: ContractionQuestion) -> list[Strategy]:
    pricing = Pricing(q)
    every = product(*[(*q.einsum.letters, None)] * len(pricing.axes))
    possible = [roles for roles in every if _is_possible(q, pricing, roles)]
    found = [one for roles in possible for one in pricing.strategies(roles)]
    return [one for one in found if not one.leaves_partial_sum]


def _is_possible(q: ContractionQuestion, pricing: Pricing, roles: tuple[str | None, ...]) -> bool:
    """Whether all dimensions divide, and what is wanted partial is summed."""
    partial = q.out.unreduced if q.out else ()
    summed = [axis for axis, role in zip(pricing.axes, roles, strict=True) if role in [*q.einsum.contracted]]
    return set(partial) <= set(summed) and pricing.least_seconds(roles) is not None


quick = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(questions(), st.sampled_from(["latency", "throughput"]), st.sampled_from([None, 0.7, 1.3]))
def test_no_choice_of_roles_is_cheaper(
    q: ContractionQuestion, objective: Objective, share: float | None
) -> None:
    everything = every_strategy(q)
    assume(everything)
    fastest = min(everything, key=lambda one: one.objective_seconds(objective))
    limit = share and share * fastest.bytes_per_device
    least = min((one.objective_seconds(objective) for one in everything if one.fits(limit)), default=inf)
    listed = strategies(q, memory_limit_bytes=limit, objective=objective)
    # The list may begin with a cheaper one: for the textbook's roles it has reshards by the rules too.
    assert listed[0].objective_seconds(objective) <= least * (1 + 1e-9)


@quick
@given(questions())
def test_bounds_hold(q: ContractionQuestion) -> None:
    pricing = Pricing(q)
    for roles in product(*[(*q.einsum.letters, None)] * len(pricing.axes)):
        if _is_possible(q, pricing, roles):
            for objective in ("latency", "throughput"):
                least = pricing.least_seconds(roles, objective)
                for one in pricing.strategies(roles, textbook=True):
                    assert least is not None
                    assert least <= one.objective_seconds(objective) * (1 + 1e-9)


@quick
@given(questions())
def test_a_strategy_costs_what_its_steps_cost(q: ContractionQuestion) -> None:
    for one in strategies(q):
        plan, steps = one.contraction, one.steps
        assert one.seconds_comms == pytest.approx(sum(step.seconds for step in steps))
        assert one.flops_per_device == plan.flops_per_device(q.mesh, q.sizes)
        sent = sum(
            sent_bytes(s.collective.op, s.num_bytes, q.mesh.size(s.collective.axes))
            for s in steps
            if s.collective.op != "slice"
        )
        assert one.bytes_moved_per_device == pytest.approx(sent, abs=1)
        arrays = (q.lhs, q.rhs, one.out)
        held = [array.bytes_per_device(q.mesh, q.sizes, q.dtype) for array in arrays]
        assert one.bytes_per_device >= held[0] + held[1]
        assert one.window is not None or one.bytes_per_device >= sum(held[:2]) + max(
            plan.product.bytes_per_device(q.mesh, q.sizes, q.dtype), held[2]
        )
        last = steps[-1].collective.result if plan.out_steps or one.via else plan.product
        assert last.same_layout(one.out)


@quick
@given(questions())
def test_the_list_is_of_the_best_and_the_textbook(q: ContractionQuestion) -> None:
    found = strategies(q)
    whole = [one for one in found if not one.leaves_partial_sum]
    assert len({(one.roles, one.out, one.via, _steps(one), one.window) for one in found}) == len(found)
    for one in whole:
        busy = [axis for s in one.steps if s.collective.op != "slice" for axis in s.collective.axes]
        assert one.seconds <= REACH * whole[0].seconds or len(set(busy)) == len(busy)


def _steps(one: Strategy) -> tuple[str, ...]:
    return tuple(str(step) for priced in one.reshards for step in priced.steps)


# Bad input.


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "sizes", "message"),
    [
        ("A[I_X, J]", "B[J, K]", "C[I, K]", "I=24,J=8,K=8", "A[I_X, J]: I = 24 does not divide over X = 16"),
        ("A[I, J]", "B[J, K]", "C[I, K]", "I=16,J=16", "B[J, K]: the size of K is missing; give K=..."),
        ("A[I_W, J]", "B[J, K]", "C[I, K]", "I=16,J=16,K=16", "mesh axis W is unknown; this mesh has X"),
        ("A[I, J]{U_W}", "B[J, K]", "C[I, K]", "I=16,J=16,K=16", "mesh axis W is unknown"),
        (
            "A[I]", "B[K]", "C[I, K]{U_X}", "I=16,K=16",
            "C[I, K]{U_X}: 'I,K->IK' contracts nothing, so it leaves no partial sum",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(lhs: str, rhs: str, out: str, sizes: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        strategies(ask(lhs, rhs, out, sizes, **RING))
    assert str(caught.value).startswith(message)


def test_dimensions_must_be_the_letters() -> None:
    arrays = parse_array("A[J, I]"), parse_array("B[J, K]"), None
    place = Mesh({"X": 16}), {"I": 16, "J": 16, "K": 16}, catalog.load("v5e:1x16").ideal(), "bf16"
    with pytest.raises(NotationError) as caught:
        strategies(ContractionQuestion(Einsum("IJ", "JK", "IK"), *arrays, *place))
    assert str(caught.value) == "A[J, I] does not have the dimensions IJ of 'IJ,JK->IK'"


def test_many_axes_take_the_textbook_roles_and_too_many_are_refused() -> None:
    """Twelve axes have 4^12 choices of a role for a matmul, and 2^12 or more even of the textbook's."""
    axes = [f"X{number}" for number in range(12)]
    mesh, sizes = Mesh(dict.fromkeys(axes, 2)), {"I": 4096, "J": 4096, "K": 4096}
    arrays = (
        ShardedArray("A", ("I", "J"), (tuple(axes), ())),
        ShardedArray("B", ("J", "K"), ((), ())),
        ShardedArray("C", ("I", "K"), (tuple(axes), ())),
    )
    hardware = catalog.load("h100:512x8").ideal()
    q = ContractionQuestion(Einsum("IJ", "JK", "IK"), *arrays, mesh, sizes, hardware, "bf16")
    assert strategies(q)[0].name == "multiply in place"
    whole = arrays[0].replace(axes={"I": ()}), arrays[1], arrays[2].replace(axes={"I": ()})
    with pytest.raises(NotationError, match="the roles of 12 mesh axes have more than 16,384 combinations"):
        strategies(ContractionQuestion(Einsum("IJ", "JK", "IK"), *whole, mesh, sizes, hardware, "bf16"))


def test_sent_bytes() -> None:
    """On a group of four that gathers 64 bytes: each block of 16 passes by all but its last holder."""
    assert [sent_bytes(op, 64, 4) for op in ("all_gather", "reduce_scatter", "all_reduce")] == [48, 48, 96]
    assert sent_bytes("all_to_all", 64, 4) == 12 and sent_bytes("permute", 64, 4) == 16


def test_operands_may_share_a_name() -> None:
    """A . A with its rows and its columns split: each operand has moves of its own."""
    shared = strategies(ask("A[I_X, J]", "A[J, K_X]", "C[I_X, K]", "I=512,J=4096,K=8192", **RING))[0]
    apart = strategies(ask("A[I_X, J]", "B[J, K_X]", "C[I_X, K]", "I=512,J=4096,K=8192", **RING))[0]
    assert shared.roles == apart.roles and shared[5:] == apart[5:]


def test_a_batch_letter_may_take_the_axis() -> None:
    """B[B_X, S, H] and q[B, N_X, H] of batch-sharded attention: q moves by an AllToAll, the cache stays."""
    q = ask("q[B, N_X, H]", "k[B_X, S, H]", "s[B_X, N, S]", "B=64,N=32,H=128,S=8192", **RING)
    one = strategies(q)[0]
    assert one.name == "AllToAll q into B over X"
    assert prod(one.contraction.product.local_shape(q.mesh, q.sizes)) == 64 // 16 * 32 * 8192
