"""Pipeline schedules: as tables, simulated, and in closed form for a search."""

from meshwright.cost.pipeline.makespan import in_flight, makespan
from meshwright.cost.pipeline.schedule import SCHEDULES, Schedule, check_schedule, routes
from meshwright.cost.pipeline.simulate import Event, PassSeconds, Timeline, Times, simulate
from meshwright.cost.pipeline.tables import schedule

__all__ = [
    "SCHEDULES",
    "Event",
    "PassSeconds",
    "Schedule",
    "Timeline",
    "Times",
    "check_schedule",
    "in_flight",
    "makespan",
    "routes",
    "schedule",
    "simulate",
]
