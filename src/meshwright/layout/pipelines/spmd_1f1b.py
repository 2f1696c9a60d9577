"""SPMD 1F1B: one program for all stages, whose ticks have a forward and a backward pass.

    tick         0 ... p-2   p-1 ... m+p-2   m+p-1 ... m+2p-3
    every stage  F           F, head, B      B

Stage s has microbatch i forward in tick i + s and backward in tick i + 2(p - 1) - s. A stage without a
microbatch in a tick computes on old values, and its cotangents are zeros: so all stages run the same program
and wait for each other only to pass activations on. Makespan (m + p - 1)(F + B), 1F1B's. Every stage keeps
2p - 1 microbatches in a ring, and has two more in transit: one that the forward pass of a tick saves, before
it is in the ring, and one that its backward pass has taken from there. The vocabulary is split over the
stages: each has its share of the embedding and of the head, so that all have the same work.
"""

from meshwright.errors import LayoutError
from meshwright.layout.pipelines.pass_table import TablePass, table_pass
from meshwright.layout.pipelines.pipeline import PipelineSchedule


def spmd_1f1b(p: int, m: int, v: int) -> list[list[TablePass]]:
    """The passes of microbatches; passes in idle ticks change no result."""
    return [[one for tick in range(m + 2 * (p - 1)) for one in _tick(s, p, m, tick)] for s in range(p)]


def _tick(stage: int, p: int, m: int, tick: int) -> list[TablePass]:
    forward, backward = tick - stage, tick - 2 * (p - 1) + stage
    passes = [table_pass("F", forward, 0)] if 0 <= forward < m else []
    return passes + ([table_pass("B", backward, 0)] if 0 <= backward < m else [])


def _check(p: int, m: int) -> None:
    if m < 2:
        raise LayoutError(
            "layout: schedule = lanes adds up the gradients of several microbatches, and microbatches = 1; "
            "fits: microbatches of 2 or more"
        )


def _alive(p: int, m: int, v: int, stage: int) -> int:
    return 2 * p + 1


def _tried(p: int, num_layers: int, every: bool) -> list[int]:
    """One chunk, if all stages have the same number of layers."""
    return [1] if num_layers % p == 0 else []


SPMD_1F1B = PipelineSchedule(
    name="lanes",
    words="one forward and one backward pass per stage and tick (SPMD 1F1B)",
    rows=spmd_1f1b,
    most_alive=_alive,
    least_stages=2,
    spmd=True,
    only_if_run=True,
    tried_chunks=_tried,
    check_numbers=_check,
)
