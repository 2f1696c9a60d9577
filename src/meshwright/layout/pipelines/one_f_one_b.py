"""1F1B: after a warm-up, one forward and one backward pass in turn."""

from meshwright.layout.pipelines.pass_table import TablePass, table_pass
from meshwright.layout.pipelines.pipeline import PipelineSchedule


def one_f_one_b(p: int, m: int, v: int) -> list[list[TablePass]]:
    """A backward pass as soon as there is one: GPipe's bubble with p - s microbatches alive, not m.

    Stage s runs p - 1 - s forward passes ahead. Source: Narayanan et al., "PipeDream" (2019) and
    "Efficient large-scale language model training on GPU clusters" (SC21), PipeDream-flush.
    """
    forward, backward = ([table_pass(kind, i, 0) for i in range(m)] for kind in "FB")
    return [in_turn(forward, backward, p - 1 - s) for s in range(p)]


def in_turn(forward: list[TablePass], backward: list[TablePass], num_ahead: int) -> list[TablePass]:
    """`num_ahead` forward passes, then one forward and one backward in turn, then the other backwards."""
    steady = zip(forward[num_ahead:], backward, strict=False)
    row = [*forward[:num_ahead], *(one for pair in steady for one in pair)]
    return [*row, *backward[max(len(forward) - num_ahead, 0) :]]


def _alive(p: int, m: int, v: int, stage: int) -> int:
    return min(m, p - stage)


ONE_F_ONE_B = PipelineSchedule(
    name="1f1b",
    words="one forward and one backward pass in turn (1F1B)",
    rows=one_f_one_b,
    most_alive=_alive,
    searched_from=1,
)
