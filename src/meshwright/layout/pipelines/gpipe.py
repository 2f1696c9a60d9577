"""GPipe: all forward passes, then all backward passes."""

from meshwright.layout.pipelines.pass_table import TablePass, table_pass
from meshwright.layout.pipelines.pipeline import PipelineSchedule


def gpipe(p: int, m: int, v: int) -> list[list[TablePass]]:
    """All forward passes, then all backward passes; m microbatches are alive on every stage.

    Source: Huang et al., "GPipe" (2018).
    """
    return [[table_pass(kind, i, 0) for kind in "FB" for i in range(m)] for _ in range(p)]


def _alive(p: int, m: int, v: int, stage: int) -> int:
    return m


GPIPE = PipelineSchedule(
    name="gpipe",
    words="all forward passes before all backward passes (GPipe)",
    rows=gpipe,
    most_alive=_alive,
    searched_from=None,  # 1F1B takes the same time with fewer microbatches alive
)
