"""What `mw shard --run` reports: the cases of the chapter, windows, every strategy, and what is refused."""

import jax
import jax.numpy as jnp
import pytest
from tests.audit.proofs import MESH, SIZES, planned, random

from meshwright.audit.compare.unnamed import derived, match
from meshwright.audit.shard.execution import emitted_by, execute
from meshwright.audit.shard.on_devices import run_job, run_reshard, run_strategy
from meshwright.audit.shard.shard_job import ShardJob
from meshwright.cost.strategies import strategies
from meshwright.cost.strategy import ContractionQuestion
from meshwright.errors import AuditError
from meshwright.hardware.catalog import load
from meshwright.nn.products.execute import contract
from meshwright.nn.sharded_arrays import put
from meshwright.nn.start.device_mesh import explicit_mesh
from meshwright.notation.collective import Collective, reshard
from meshwright.notation.einsum import Einsum, EinsumSide
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array, parse_sizes


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
    report = run_job(ShardJob(planned(lhs, rhs, out, roles), (), None, MESH, SIZES, "bf16"))
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
    window: EinsumSide, lhs: str, rhs: str, out: str, roles: dict[str, str | None]
) -> None:
    """n - 1 permutes take the place of a gather or a scatter over n devices."""
    plan = planned(lhs, rhs, out, roles)
    report = execute(ShardJob(plan, (), window, MESH, SIZES, "f32"))
    assert report["max_abs_error"] == 0
    (step,) = [one for one in report["derived"] if one["windowed"]]
    ring = [one for one in report["emitted"] if one["op"] == "permute"]
    assert len(ring) == MESH.size(tuple(step["axes"])) - 1
    assert {pair["status"] for pair in report["pairs"]} == {"match"}


@pytest.mark.parametrize("out", [None, "C[I_X, K]"])
def test_every_strategy_of_a_contraction_runs_as_priced(out: str | None) -> None:
    """Windows, sums that pass through another sharding and sums left partial, in any order of choice."""
    arrays = parse_array("A[I_X, J]"), parse_array("B[J_X, K]"), parse_array(out) if out else None
    mesh, sizes = Mesh({"X": 4}), {"I": 64, "J": 64, "K": 64}
    question = ContractionQuestion(Einsum.parse("IJ,JK->IK"), *arrays, mesh, sizes, load("v5e:2x2"), "bf16")
    for strategy in strategies(question):
        report = run_strategy(strategy)
        assert report["max_abs_error"] == 0, strategy.name
        assert "differs" not in [pair["status"] for pair in report["pairs"]], strategy.name
        priced = [(step.collective.op, step.num_bytes) for step in strategy.steps if step.seconds]
        assert [(one["op"], one["bytes"]) for one in report["derived"]] == priced, strategy.name


class TestRunning:
    PLAN = planned("A[I, J_X]", "B[J_X, K]", "C[I, K]", {"X": "J"})

    def test_more_devices_than_this_process_has_are_run_in_another(self) -> None:
        report = run_job(ShardJob(self.PLAN, (), None, Mesh({"X": 16}), SIZES, "f32"))
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
            run_job(ShardJob(self.PLAN, (), None, mesh, parse_sizes(sizes), dtype))
        assert str(caught.value) == message


class TestMatching:
    """The proof can fail: what is left out, added or of another size is found."""

    PLAN = planned("A[I_X, J]", "B[J_X, K_Y]", "C[I_X, K]", {"X": "I", "Y": "K"})

    def pairs(self, steps: list[Collective]) -> list[str]:
        mesh = explicit_mesh(MESH)
        placed = [put(random(array, SIZES, 0), array, mesh) for array in (self.PLAN.lhs, self.PLAN.rhs)]
        with jax.set_mesh(mesh):
            compiled = jax.jit(lambda a, b: contract(self.PLAN, jnp.float32, a, b)).lower(*placed).compile()
        wanted = derived(steps, MESH, SIZES, "f32")
        return [pair.note or pair.status for pair in match(wanted, emitted_by(compiled, MESH))]

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
