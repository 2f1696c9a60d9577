"""The table of each schedule.

Letters: p stages, m microbatches, v chunks a stage, s a stage. What is said of time holds where F = B = W.
"""

from meshwright.layout.pipeline.dualpipe import dualpipe
from meshwright.layout.pipeline.schedule import Pass, Schedule, check_schedule, routes
from meshwright.layout.pipeline.zero_bubble import zb_h1, zb_v


def schedule(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule of this name: gpipe, 1f1b, interleaved, zb-h1, zb-v or dualpipe.

    num_chunks counts for `interleaved` alone: zb-v and dualpipe have two chunks a stage, others one.
    Raises LayoutError for numbers with which the schedule does not exist.

    >>> [one.kind + str(one.microbatch) for one in schedule("1f1b", 2, 3).rows[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    check_schedule(name, num_stages, num_microbatches, num_chunks)
    if name == "interleaved":
        rows = interleaved(num_stages, num_microbatches, num_chunks)
    else:
        rows = _ROWS[name](num_stages, num_microbatches)
    return Schedule(
        name, num_microbatches, routes(name, num_stages, num_chunks), tuple(tuple(row) for row in rows)
    )


def gpipe(p: int, m: int) -> list[list[Pass]]:
    """All forward passes, then all backward passes; m microbatches alive.

    Source: Huang et al., "GPipe" (2018).
    """
    return [[Pass(kind, i, 0) for kind in "FB" for i in range(m)] for _ in range(p)]


def one_f_one_b(p: int, m: int) -> list[list[Pass]]:
    """A backward pass as soon as there is one: GPipe's bubble with p - s microbatches alive, not m.

    Stage s runs p - 1 - s forward passes ahead. Source: Narayanan et al., "PipeDream" (2019) and
    "Efficient large-scale language model training on GPU clusters" (SC21), PipeDream-flush.
    """
    forward, backward = ([Pass(kind, i, 0) for i in range(m)] for kind in "FB")
    return [_one_by_one(forward, backward, p - 1 - s) for s in range(p)]


def interleaved(p: int, m: int, v: int) -> list[list[Pass]]:
    """1F1B over v chunks a stage: 1/v of the bubble for v times the hops and more activations alive.

    Microbatches go in groups of p: each group passes chunk 0 of a stage, then chunk 1, and so on;
    backward from the last chunk. Stage s runs 2 (p - 1 - s) + (v - 1) p forward passes ahead.
    Source: Narayanan et al. (SC21), section 2.2.2, with Megatron-LM's warm-up.
    """
    groups = range(0, m, p)
    forward = [Pass("F", g + i, c) for g in groups for c in range(v) for i in range(p)]
    backward = [Pass("B", g + i, v - 1 - c) for g in groups for c in range(v) for i in range(p)]
    return [_one_by_one(forward, backward, 2 * (p - 1 - s) + (v - 1) * p) for s in range(p)]


def _one_by_one(forward: list[Pass], backward: list[Pass], num_ahead: int) -> list[Pass]:
    """`num_ahead` forward passes, then one forward and one backward in turn, then the other backwards."""
    steady = zip(forward[num_ahead:], backward, strict=False)
    row = [*forward[:num_ahead], *(one for pair in steady for one in pair)]
    return [*row, *backward[max(len(forward) - num_ahead, 0) :]]


_ROWS = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-v": zb_v, "dualpipe": dualpipe}
