"""Proof by execution: what devices compute is the dense product and gradient, and what XLA emits is
what the algebra derives.

Random einsums, shapes, meshes of up to 8 devices and 3 axes, shardings with several axes on a
dimension and partial sums, roles and wanted outputs, all in explicit mode. Values are small integers,
so equal means equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.notation.devices import meshes, shardings
from tests.notation.test_einsum import specs

from meshwright.audit.execution import emitted_by, execute
from meshwright.audit.job import Job
from meshwright.audit.matching import Pair, derived, match
from meshwright.audit.shard import run_contraction, run_reshard
from meshwright.cost.strategy import Operand
from meshwright.errors import AuditError
from meshwright.nn.blocks import max_abs_error, put
from meshwright.nn.execute import contract, run_steps
from meshwright.nn.mesh import explicit_mesh
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective, Op, reshard, ring_bytes
from meshwright.notation.einsum import Contraction, Einsum, contraction, cotangent
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array, parse_sizes
from meshwright.notation.resharding import cheapest_reshard

QUICK, NIGHTLY = 50, 1500


@dataclass(frozen=True)
class Case:
    """A contraction on a mesh, with the size of every letter."""

    mesh: Mesh
    plan: Contraction
    sizes: dict[str, int]


def arrays_of(plan: Contraction) -> list[ShardedArray]:
    """Every sharding that an array has on its way, forward and backward."""
    routes = (plan.lhs_route, plan.rhs_route, plan.out_route)
    ends = [array for route in routes for array in (route.given, route.used, route.yielded)]
    steps = [step.result for route in routes for step in (*route.forward, *route.backward)]
    return ends + steps


def least_sizes(arrays: Sequence[ShardedArray], mesh: Mesh) -> dict[str, int]:
    """The smallest size of every dimension that divides in each of `arrays`."""
    sizes: dict[str, int] = {}
    for array in arrays:
        for dim, axes in zip(array.dims, array.axes, strict=True):
            sizes[dim] = lcm(sizes.get(dim, 1), mesh.size(axes))
    return sizes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    spec, mesh = draw(specs()), draw(meshes(max_devices=8))
    einsum = Einsum.parse(spec)
    lhs = draw(shardings(mesh, einsum.lhs, "A", unreduced=True))
    rhs = draw(shardings(mesh, einsum.rhs, "B", unreduced=True))
    roles = {
        axis: draw(st.sampled_from([*einsum.letters, None])) for axis in draw(st.permutations(mesh.axes))
    }
    out = draw(shardings(mesh, einsum.out, "C"))
    deferred = [axis for axis, letter in roles.items() if letter and letter in einsum.contracted]
    partial = tuple(axis for axis in deferred if axis not in out.sharded_axes and draw(st.booleans()))
    plan = contraction(spec, lhs, rhs, out.replace(unreduced=partial), roles)
    least = least_sizes(arrays_of(plan), mesh)
    return Case(mesh, plan, {dim: size * draw(st.integers(1, 3)) for dim, size in least.items()})


def random(array: ShardedArray, sizes: dict[str, int], seed: int) -> np.ndarray:
    shape = [sizes[dim] for dim in array.dims]
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def differing(pairs: list[Pair]) -> list[str]:
    """What has no counterpart, in words."""
    found = [pair for pair in pairs if pair.status == "differs"]
    return [f"{pair.note}: {one.collective}" for pair in found for one in (*pair.derived, *pair.emitted)]


def prove_forward(case: Case) -> None:
    """The product is the dense one, with exactly the collectives of the steps."""
    plan, mesh = case.plan, explicit_mesh(case.mesh)
    lhs, rhs = random(plan.lhs, case.sizes, 1), random(plan.rhs, case.sizes, 2)
    placed = put(lhs, plan.lhs, mesh, seed=3), put(rhs, plan.rhs, mesh, seed=4)
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda a, b: contract(plan, jnp.float32, a, b)).lower(*placed).compile()
        result = compiled(*placed)
    assert max_abs_error(result, plan.out, np.einsum(str(plan.einsum), lhs, rhs)) == 0
    wanted = derived(plan.steps, case.mesh, case.sizes, "f32")
    assert differing(match(wanted, emitted_by(compiled, case.mesh), case.mesh)) == []


def prove_gradients(case: Case) -> None:
    """jax.grad of a scalar gives the dense gradients, with the collectives of the transposed contractions."""
    plan, mesh, einsum = case.plan, explicit_mesh(case.mesh), case.plan.einsum
    lhs, rhs, weights = (
        random(array, case.sizes, seed) for seed, array in enumerate((plan.lhs, plan.rhs, plan.out))
    )
    operands = put(lhs, plan.lhs, mesh, seed=3), put(rhs, plan.rhs, mesh, seed=4)
    d_out = put(weights, cotangent(plan.out), mesh, reduced=plan.out.unreduced)

    def scalar(a: jax.Array, b: jax.Array, weights: jax.Array) -> jax.Array:
        """Its derivative by the product is `weights`."""
        return jnp.sum(contract(plan, jnp.float32, a, b) * weights)

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(scalar, argnums=(0, 1))).lower(*operands, d_out).compile()
        d_lhs, d_rhs = compiled(*operands, d_out)
    dense_lhs = np.einsum(f"{einsum.out},{einsum.rhs}->{einsum.lhs}", weights, rhs)
    dense_rhs = np.einsum(f"{einsum.lhs},{einsum.out}->{einsum.rhs}", lhs, weights)
    assert max_abs_error(d_lhs, cotangent(plan.lhs), dense_lhs) == 0
    assert max_abs_error(d_rhs, cotangent(plan.rhs), dense_rhs) == 0
    wanted = derived(backward_steps(plan), case.mesh, case.sizes, "f32")
    assert differing(match(wanted, emitted_by(compiled, case.mesh), case.mesh)) == []


def backward_steps(plan: Contraction) -> list[Collective]:
    """Both operands moved as forward, d out moved once, and both gradients brought home."""
    of_lhs, of_rhs = plan.lhs_gradient, plan.rhs_gradient
    assert of_lhs.rhs_steps == of_rhs.lhs_steps == [], "operands are kept as computed on"
    assert of_lhs.lhs_steps == of_rhs.rhs_steps, "both gradients read the same d out"
    return [*plan.lhs_steps, *plan.rhs_steps, *of_lhs.lhs_steps, *of_lhs.out_steps, *of_rhs.out_steps]


# What XLA emits may be told apart only together: a sum that is sliced later claims no scatter's slice.
SLICED_LATER = Case(
    Mesh({"X": 2, "Y": 2}),
    contraction(
        "B,AB->A",
        parse_array("A[B]{U_Y}"),
        parse_array("B[A_XY, B]"),
        parse_array("C[A_Y]"),
        {"X": "A", "Y": "B"},
    ),
    {"A": 4, "B": 2},
)


@settings(max_examples=QUICK)
@given(cases())
@example(SLICED_LATER)
def test_the_product_is_dense_and_emits_what_was_derived(case: Case) -> None:
    prove_forward(case)


@settings(max_examples=QUICK)
@given(cases())
def test_the_gradients_are_dense_and_emit_what_was_derived(case: Case) -> None:
    prove_gradients(case)


@pytest.mark.slow
@settings(max_examples=NIGHTLY)
@given(cases())
def test_every_product_and_gradient(case: Case) -> None:
    prove_forward(case)
    prove_gradients(case)


@st.composite
def reshards(draw: st.DrawFn) -> tuple[Mesh, ShardedArray, ShardedArray]:
    """Two shardings of one array of up to three dimensions; the second is as finished or more."""
    mesh, dims = draw(meshes(max_devices=8)), draw(st.sampled_from(["I", "IJ", "IJK"]))
    array, target = draw(shardings(mesh, dims, unreduced=True)), draw(shardings(mesh, dims))
    kept = tuple(a for a in array.unreduced if a not in target.sharded_axes and draw(st.booleans()))
    return mesh, array, target.replace(unreduced=kept)


def prove_reshard(mesh: Mesh, steps: list[Collective]) -> list[Pair]:
    """The array is the same after `steps`; what was derived beside what was emitted."""
    if not steps:
        return []
    devices = explicit_mesh(mesh)
    sizes = least_sizes([steps[0].operand, *(step.result for step in steps)], mesh)
    whole = random(steps[0].operand, sizes, 1)
    placed = put(whole, steps[0].operand, devices, seed=2)
    with jax.set_mesh(devices):
        compiled = jax.jit(lambda x: run_steps(x, steps)).lower(placed).compile()
        assert max_abs_error(compiled(placed), steps[-1].result, whole) == 0
    return match(derived(steps, mesh, sizes, "f32"), emitted_by(compiled, mesh), mesh)


@settings(max_examples=QUICK // 2)
@given(reshards())
def test_a_reshard_keeps_the_array_and_emits_what_was_derived(
    case: tuple[Mesh, ShardedArray, ShardedArray],
) -> None:
    mesh, array, target = case
    assert differing(prove_reshard(mesh, reshard(array, target))) == []


@settings(max_examples=QUICK // 2)
@given(reshards())
def test_the_cheapest_reshard_keeps_the_array(case: tuple[Mesh, ShardedArray, ShardedArray]) -> None:
    mesh, array, target = case
    sizes = dict.fromkeys(array.dims, mesh.num_devices)
    steps = cheapest_reshard(
        array, target, mesh, sizes, lambda op, axes, num_bytes: ring_bytes(op, num_bytes, mesh.size(axes))
    )
    assert differing(prove_reshard(mesh, steps)) == []


MESH = Mesh({"X": 4, "Y": 2})
SIZES = dict.fromkeys("IJKL", 16)


def chapter_case(lhs: str, rhs: str, out: str, roles: dict[str, str | None]) -> Contraction:
    a, b, c = parse_array(lhs), parse_array(rhs), parse_array(out)
    return contraction(f"{''.join(a.dims)},{''.join(b.dims)}->{''.join(c.dims)}", a, b, c, roles)


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "roles", "steps"),
    [
        ("A[I_X, J]", "B[J, K_Y]", "C[I_X, K_Y]", {"X": "I", "Y": "K"}, []),
        ("A[I, J_X]", "B[J, K]", "C[I, K]", {"X": None}, ["all_gather"]),
        ("A[I, J_X]", "B[J, K]", "C[I, K]", {"X": "J"}, ["all_reduce"]),
        ("A[I, J_X]", "B[J_X, K]", "C[I, K]", {"X": "J"}, ["all_reduce"]),
        ("A[I, J_X]", "B[J_X, K]", "C[I, K_X]", {"X": "J"}, ["reduce_scatter"]),
        ("A[I, J_X]", "B[J_X, K]", "C[I_X, K]", {"X": "J"}, ["reduce_scatter"]),
        ("A[I, J_X]", "B[J_X, K]", "C[I, K]{U_X}", {"X": "J"}, []),
        ("A[I_X, J]", "B[J, K_X]", "C[I, K_X]", {"X": "K"}, ["all_gather"]),
        ("A[I_X, J]", "B[J, K_X]", "C[I_X, K]", {"X": "I"}, ["all_gather"]),
        ("A[I_X, J]", "B[J, K]", "C[I, K]", {"X": "I"}, ["all_gather"]),
        ("A[I_X, J_Y]", "B[J_Y, K]", "C[I_X, K]", {"X": "I", "Y": "J"}, ["all_reduce"]),
    ],
)
def test_the_four_cases_of_the_chapter(
    lhs: str, rhs: str, out: str, roles: dict[str, str | None], steps: list[str]
) -> None:
    """How to Scale Your Model, "Sharded Matrices": cases 1 to 4, and questions 4, 6 and 9."""
    report = run_contraction(chapter_case(lhs, rhs, out, roles), MESH, SIZES, "bf16")
    assert report["max_abs_error"] == 0
    assert [step["op"] for step in report["derived"]] == steps
    assert "differs" not in [pair["status"] for pair in report["pairs"]]


@pytest.mark.parametrize(
    ("array", "target", "op", "num_bytes"),
    [
        ("A[I_X, J]", "A[I, J]", "all_gather", 1024),
        ("A[I_XY, J]", "A[I, J]", "all_gather", 1024),
        ("A[I_XY, J]", "A[I_X, J]", "all_gather", 256),
        ("A[I_X, J_Y]", "A[I, J_Y]", "all_gather", 512),
        ("A[I_X, J]{U_Y}", "A[I_X, J]", "all_reduce", 256),
        ("A[I_X, J]{U_Y}", "A[I_X, J_Y]", "reduce_scatter", 256),
        ("A[I_X, J]", "A[I, J_X]", "all_to_all", 1024),
        ("A[I, J]", "A[I_X, J]", None, 0),
    ],
)
def test_the_primitives_of_the_chapter(array: str, target: str, op: str | None, num_bytes: int) -> None:
    """AllGather removes a subscript, ReduceScatter adds one, AllToAll moves one; V of f32[16, 16]."""
    steps = reshard(parse_array(array), parse_array(target))
    report = run_reshard(steps, MESH, SIZES, "f32")
    assert report["max_abs_error"] == 0
    found = [(one["op"], one["bytes"]) for one in report["emitted"]]
    if op == "reduce_scatter":  # XLA:CPU keeps a slice of an all-reduce
        assert found == [("all_reduce", num_bytes)] and report["pairs"][0]["status"] == "equivalent"
    else:
        assert found == ([(op, num_bytes)] if op else [])


@pytest.mark.parametrize(
    ("op", "axes", "array", "target"),
    [
        ("all_gather", "XYZ", "A[I_XY, J_Z]", "A[I, J]"),
        ("all_gather", "XY", "A[I_X, J_Y, K_Z]{U_W}", "A[I, J, K_Z]{U_W}"),
        ("reduce_scatter", "XZY", "A[I, J]{U_XYZ}", "A[I_XZ, J_Y]"),
        ("reduce_scatter", "YX", "A[I_Z, J, K]{U_WXY}", "A[I_ZY, J_X, K]{U_W}"),
        ("all_to_all", "XY", "A[I_XY, J, K]", "A[I, J_X, K_Y]"),
        ("all_to_all", "YX", "A[I_Y, J_X, K]", "A[I, J, K_YX]"),
        ("permute", "XY", "A[I_XY, J]", "A[I_YX, J]"),
        ("permute", "XY", "A[I_X, J_Y]", "A[I_Y, J_X]"),
    ],
)
def test_a_collective_on_several_dimensions_is_emitted_as_one(
    op: Op, axes: str, array: str, target: str
) -> None:
    """What a search finds cheapest, and a reshard of JAX would do in two steps or by gathering it all."""
    mesh = Mesh({"X": 2, "Y": 2, "Z": 2, "W": 1})
    (pair,) = prove_reshard(mesh, [Collective(op, tuple(axes), parse_array(array), parse_array(target))])
    assert pair.status == "match"


@pytest.mark.parametrize(
    ("window", "lhs", "rhs", "out", "roles"),
    [
        ("rhs", "A[I_X, J]", "B[J_X, K]", "C[I_X, K]", {"X": "I"}),
        ("lhs", "A[I_X, J]", "B[J, K_X]", "C[I, K_X]", {"X": "K"}),
        ("lhs", "A[I_XY, J]", "B[J, K_XY]", "C[I, K_XY]", {"X": "K", "Y": "K"}),
        ("lhs", "A[L_X, I, J]", "B[L, J, K]", "C[L, I, K]", {"X": None}),
        ("out", "A[I, J_X]", "B[J_X, K]", "C[I, K_X]", {"X": "J"}),
        ("out", "A[I_Y, J_X]", "B[J_X, K]", "C[I_YX, K]", {"X": "J", "Y": "I"}),
        ("out", "A[L, I, J_X]", "B[L, J_X, K]", "C[L_X, I, K]{U_Y}", {"X": "J", "Y": "J"}),
    ],
)
def test_a_windowed_product_hands_blocks_round_a_ring(
    window: Operand, lhs: str, rhs: str, out: str, roles: dict[str, str | None]
) -> None:
    """n - 1 permutes take the place of a gather or a scatter over n devices."""
    plan = chapter_case(lhs, rhs, out, roles)
    report = execute(Job(plan, (), window, MESH, SIZES, "f32", seed=0))
    assert report["max_abs_error"] == 0
    (step,) = [one for one in report["derived"] if one["windowed"]]
    ring = [one for one in report["emitted"] if one["op"] == "permute"]
    assert len(ring) == MESH.size(tuple(step["axes"])) - 1
    assert {pair["status"] for pair in report["pairs"]} == {"match"}


class TestRunning:
    PLAN = chapter_case("A[I, J_X]", "B[J_X, K]", "C[I, K]", {"X": "J"})

    def test_more_devices_than_this_process_has_are_run_in_another(self) -> None:
        report = run_contraction(self.PLAN, Mesh({"X": 16}), SIZES, "f32")
        assert report["max_abs_error"] == 0
        assert [(one["op"], one["axes"], one["bytes"]) for one in report["emitted"]] == [
            ("all_reduce", ["X"], 16 * 16 * 4)
        ]
        assert report["derived"][0] == {
            "op": "all_reduce",
            "axes": ["X"],
            "operand": "C[I, K]{U_X}",
            "result": "C[I, K]",
            "bytes": 16 * 16 * 4,
            "windowed": False,
        }
        assert report["pairs"] == [{"derived": [0], "emitted": [0], "status": "match", "note": ""}]

    def test_what_a_reshard_without_steps_does(self) -> None:
        assert run_reshard([], MESH, SIZES, "f32") == {
            "max_abs_error": 0.0,
            "emitted": [],
            "derived": [],
            "pairs": [],
        }

    @pytest.mark.parametrize(
        ("mesh", "sizes", "dtype", "message"),
        [
            (MESH, "I=16,J=16,K=16", "int8", "int8 is not run; fits: f32, bf16, f16"),
            (
                Mesh({"X": 128}),
                "I=16,J=128,K=16",
                "f32",
                "Mesh({'X': 128}) has 128 devices; fits: at most 64 virtual ones",
            ),
            (
                MESH,
                "I=1000000000000,J=4,K=4",
                "f32",
                "a run of 6.4e+13 FLOPs is too long here; fits: 2e+12, at smaller sizes",
            ),
            (
                MESH,
                "I=32768,J=32768,K=4",
                "f32",
                "a run holds 8.59 GB of one array on all devices together; fits: 2 GB, at smaller sizes",
            ),
        ],
    )
    def test_what_is_not_run(self, mesh: Mesh, sizes: str, dtype: str, message: str) -> None:
        with pytest.raises(AuditError) as caught:
            run_contraction(self.PLAN, mesh, parse_sizes(sizes), dtype)
        assert str(caught.value) == message


class TestMatching:
    """The proof can fail: what is left out, added or of another size is found."""

    PLAN = chapter_case("A[I_X, J]", "B[J_X, K_Y]", "C[I_X, K]", {"X": "I", "Y": "K"})

    def pairs(self, steps: list[Collective]) -> list[str]:
        mesh = explicit_mesh(MESH)
        placed = [put(random(array, SIZES, 0), array, mesh) for array in (self.PLAN.lhs, self.PLAN.rhs)]
        with jax.set_mesh(mesh):
            compiled = jax.jit(lambda a, b: contract(self.PLAN, jnp.float32, a, b)).lower(*placed).compile()
        wanted = derived(steps, MESH, SIZES, "f32")
        return [pair.note or pair.status for pair in match(wanted, emitted_by(compiled, MESH), MESH)]

    def test_all_that_was_derived(self) -> None:
        assert self.pairs(self.PLAN.steps) == ["match", "match"]

    def test_one_left_out(self) -> None:
        assert self.pairs(self.PLAN.rhs_steps) == ["match", "emitted and not derived"]

    def test_one_too_many(self) -> None:
        steps = [*self.PLAN.steps, *reshard(parse_array("A[I_X]{U_Y}"), parse_array("A[I_X]"))]
        assert self.pairs(steps) == ["match", "match", "derived and not emitted"]

    def test_one_of_another_size(self) -> None:
        wrong = reshard(parse_array("B[J_X, K]"), parse_array("B[J, K]"))
        assert self.pairs([*wrong, *self.PLAN.out_steps]) == [
            "match",
            "derived and not emitted",
            "emitted and not derived",
        ]
