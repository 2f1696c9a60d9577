"""The price of both passes, against the training chapter's closed forms."""

import pytest

from meshwright.cost.derivation import PricedSteps, algorithm_of, priced_steps
from meshwright.cost.strategies import strategies
from meshwright.cost.strategy import ContractionQuestion
from meshwright.errors import NotationError
from meshwright.hardware import catalog
from meshwright.notation.algorithm import Local
from meshwright.notation.derive import derive
from meshwright.notation.einsum import Einsum
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array
from meshwright.notation.written import parse_written

B, D, F, X = 8192, 4096, 16384, 4
SIZES = {"B": B, "D": D, "F": F}
FLOPS, RING = 4.59e14, 1.8e11  # v5p: bf16, both directions of one axis


def passes(text: str, mesh: dict[str, int], hardware: str) -> tuple[PricedSteps, PricedSteps]:
    found, machine = derive(*parse_written(text)), catalog.load(hardware)
    forward, backward = (
        priced_steps(steps, Mesh(mesh), SIZES, "bf16", machine) for steps in (found.forward, found.backward)
    )
    return forward, backward


def test_fully_sharded_data_parallelism() -> None:
    """12BDF/X FLOPs in all; 4DF bytes forward and 8DF backward, none of which the next layer waits for."""
    text = "x[B_X, D] . w[D_X, F] -> h; h . v[F, D_X] -> y[B_X, D]"
    forward, backward = passes(text, {"X": X, "Y": 16}, "v5p:4x4x4")
    assert sum(line.flops for line in (*forward.lines, *backward.lines)) == 12 * B * D * F / X
    assert forward.seconds_comms() == forward.seconds_comms("ahead") == pytest.approx(4 * D * F / RING)
    assert backward.seconds_comms("ahead") == pytest.approx(4 * D * F / RING)
    assert backward.seconds_comms("deferred") == pytest.approx(4 * D * F / RING)
    assert backward.seconds_comms("critical") == 0
    assert forward.seconds == pytest.approx(forward.seconds_compute + forward.seconds_comms())
    assert forward.seconds_overlapped == max(forward.seconds_compute, forward.seconds_comms())


def test_tensor_parallelism_waits() -> None:
    """4BD bytes on the critical path of each pass, which no product hides."""
    text = "x[B, D_X] . w[D, F_X] -> h; h . v[F_X, D] -> y[B, D_X]"
    for one in passes(text, {"X": X, "Y": 16}, "v5p:4x4x4"):
        assert one.seconds_comms("critical") == pytest.approx(4 * B * D / RING)
        assert one.seconds_overlapped >= one.seconds_compute + one.seconds_comms("critical")


def test_a_function_of_elements_is_read_and_written_and_a_view_is_free() -> None:
    text = "a[B_X, F] = gelu(x[B_X, F]); y[B, C, E] = split(a)"
    found, machine = derive(*parse_written(text)), catalog.load("v5p:4x1x1")
    sizes = {"B": B, "F": F, "C": 128, "E": 128}
    one = priced_steps(found.forward, Mesh({"X": X}), sizes, "bf16", machine)
    gelu, split = (line for line in one.lines if isinstance(line.step.action, Local))
    assert gelu.num_bytes == 2 * 2 * B * F // X
    assert gelu.seconds == pytest.approx(gelu.num_bytes / machine.chip.memory_bytes_per_second("bf16"))
    assert split.seconds == split.num_bytes == 0


def test_the_passes_of_a_strategy_move_as_it_does() -> None:
    mesh, sizes = Mesh({"X": 4, "Y": 2}), {"I": 1024, "J": 4096, "K": 4096}
    arrays = parse_array("A[I_X, J]"), parse_array("B[J_X, K]"), parse_array("C[I_X, K]")
    question = ContractionQuestion(
        Einsum.parse("IJ,JK->IK"), *arrays, mesh, sizes, catalog.load("v5e:4x2"), "bf16"
    )
    best = strategies(question)[0]
    assert not all(reshard.by_rules for reshard in best.reshards)
    found = algorithm_of(best)
    forward = [step.action for step in found.forward if not isinstance(step.action, Local)]
    assert forward == [step.collective for step in best.steps]
    assert str(found.backward[-1].result) == "dA[I_X, J]"
    priced = priced_steps(found.forward, mesh, sizes, "bf16", question.hardware)
    assert priced.seconds_comms() == pytest.approx(best.seconds_comms)
    assert priced.seconds_compute == pytest.approx(best.seconds_compute)


def test_operands_of_one_name_are_told_apart() -> None:
    arrays = parse_array("A[I_X, J]"), parse_array("A[J, K]"), parse_array("C[I, K]")
    question = ContractionQuestion(
        Einsum.parse("IJ,JK->IK"),
        *arrays,
        Mesh({"X": 4}),
        dict.fromkeys("IJK", 64),
        catalog.load("v5e:4x1"),
        "bf16",
    )
    results = {step.result.name for step in algorithm_of(strategies(question)[0]).backward}
    assert {"dA", "dA2"} <= results


def test_what_does_not_divide_is_refused() -> None:
    found = derive(*parse_written("x[B_X, D] . w[D, F] -> h; h . v[F, D] -> y"))
    with pytest.raises(NotationError, match=r"B = 6 does not divide over X = 4; fits: 1, 2, 3"):
        priced_steps(found.forward, Mesh({"X": 4}), SIZES | {"B": 6}, "bf16", catalog.load("v5e:4x1"))
