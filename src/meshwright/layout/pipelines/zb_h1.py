"""ZB-H1: 1F1B with a split backward pass; gradients of weights fill idle slots."""

from meshwright.layout.pipelines.pass_table import TablePass, table_pass
from meshwright.layout.pipelines.pipeline import PipelineSchedule


def zb_h1(p: int, m: int, v: int) -> list[list[TablePass]]:
    """1F1B with W s microbatches late on stage s: a third of its bubble, p microbatches alive everywhere.

    The table is made for F = B = W; other times give the same order with some bubble. The first stage
    has no time to spare, since every W there lets the next F in. The last stage hands its first p
    backward passes on at once and makes up for their W when the forward passes are over.
    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
    """
    rows: list[list[TablePass]] = []
    for s in range(p):
        row = [table_pass("F", i, 0) for i in range(min(m, p - s))]
        for i in range(m):
            row.append(table_pass("B", i, 0))
            row += [table_pass("W", i - s, 0)] if i >= s else []
            row += [table_pass("F", i + p - s, 0)] if i + p - s < m else []
        rows.append([*row, *(table_pass("W", i, 0) for i in range(max(m - s, 0), m))])
    return rows


def _alive(p: int, m: int, v: int, stage: int) -> int:
    return min(m, p)


ZB_H1 = PipelineSchedule(
    name="zb-h1",
    words="gradients of weights are computed in idle slots (zero bubble, ZB-H1)",
    rows=zb_h1,
    most_alive=_alive,
    splits_backward=True,
)
