"""Pipeline schedules: one record each, with the table of every stage's passes."""

from meshwright.errors import LayoutError, nearest
from meshwright.layout.pipelines.dualpipe import DUALPIPE
from meshwright.layout.pipelines.gpipe import GPIPE
from meshwright.layout.pipelines.interleaved import INTERLEAVED
from meshwright.layout.pipelines.one_f_one_b import ONE_F_ONE_B
from meshwright.layout.pipelines.pass_table import PassTable, Place, StageRoute, TablePass
from meshwright.layout.pipelines.pipeline import PipelineSchedule
from meshwright.layout.pipelines.spmd_1f1b import SPMD_1F1B
from meshwright.layout.pipelines.zb_h1 import ZB_H1
from meshwright.layout.pipelines.zb_v import ZB_V

__all__ = [
    "SCHEDULES",
    "PassTable",
    "PipelineSchedule",
    "Place",
    "StageRoute",
    "TablePass",
    "pass_table",
    "pipeline_schedule",
]

# Every schedule by name; of schedules that take the same time a search prefers the earlier.
SCHEDULES: dict[str, PipelineSchedule] = {
    schedule.name: schedule
    for schedule in (GPIPE, SPMD_1F1B, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZB_V, DUALPIPE)
}


def pipeline_schedule(name: str) -> PipelineSchedule:
    """The schedule of this name. Raises LayoutError with the nearest known name where there is none."""
    if name not in SCHEDULES:
        raise LayoutError(f"layout: schedule = {name!r}; {nearest(name, list(SCHEDULES))}")
    return SCHEDULES[name]


def pass_table(name: str, stages: int, microbatches: int, chunks: int = 1) -> PassTable:
    """The table of a schedule: for every stage, its passes in order.

    chunks: chunks a stage, if the schedule has a choice (interleaved).
    Raises LayoutError if the schedule does not exist for these arguments.

    >>> [one.kind + str(one.microbatch) for one in pass_table("1f1b", 2, 3).rows[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    return pipeline_schedule(name).table(stages, microbatches, chunks)
