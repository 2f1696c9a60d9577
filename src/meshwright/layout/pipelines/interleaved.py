"""Interleaved 1F1B: every stage holds several chunks of the model, and microbatches go round."""

from meshwright.errors import LayoutError
from meshwright.layout.pipelines.one_f_one_b import in_turn
from meshwright.layout.pipelines.pass_table import TablePass, table_pass
from meshwright.layout.pipelines.pipeline import PipelineSchedule, fitting


def interleaved(p: int, m: int, v: int) -> list[list[TablePass]]:
    """1F1B over v chunks a stage: 1/v of the bubble for v times the hops and more activations alive.

    Microbatches go in groups of p: each group passes chunk 0 of a stage, then chunk 1, and so on;
    backward from the last chunk. Stage s runs 2 (p - 1 - s) + (v - 1) p forward passes ahead.
    Source: Narayanan et al. (SC21), section 2.2.2, with Megatron-LM's warm-up.
    """
    groups = range(0, m, p)
    forward = [table_pass("F", g + i, c) for g in groups for c in range(v) for i in range(p)]
    backward = [table_pass("B", g + i, v - 1 - c) for g in groups for c in range(v) for i in range(p)]
    return [in_turn(forward, backward, 2 * (p - 1 - s) + (v - 1) * p) for s in range(p)]


def _alive(p: int, m: int, v: int, stage: int) -> int:
    return min(v * m, 2 * (p - 1 - stage) + (v - 1) * p + 1)


def _check(p: int, m: int) -> None:
    if m % p:
        raise LayoutError(
            f"layout: schedule = interleaved runs microbatches in groups of pipe = {p}, and {m} do not "
            f"divide; fits: microbatches in {fitting(m // p * p, (m // p + 1) * p)}"
        )


def _tried(p: int, num_layers: int, every: bool) -> list[int]:
    """Two chunks, four, the fewest that divide the layers, and a chunk for every layer."""
    # The first chunk may hold only the embedding, and the last only the head.
    most = min(-(-num_layers // p), (num_layers + 2) // p)
    if every:
        return list(range(2, most + 1))
    even = next((v for v in range(2, num_layers // p + 1) if num_layers % (p * v) == 0), most)
    return sorted({v for v in (2, 4, even, most) if 2 <= v <= most})


INTERLEAVED = PipelineSchedule(
    name="interleaved",
    words="one forward and one backward pass in turn, over several chunks per stage (interleaved 1F1B)",
    rows=interleaved,
    most_alive=_alive,
    num_chunks=None,
    least_stages=2,
    check_numbers=_check,
    tried_chunks=_tried,
)
