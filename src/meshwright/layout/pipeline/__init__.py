"""Pipeline schedules as tables: for every stage, the passes that it makes, in order."""

from meshwright.layout.pipeline.schedule import SCHEDULES, Schedule, check_schedule, routes
from meshwright.layout.pipeline.tables import schedule

__all__ = ["SCHEDULES", "Schedule", "check_schedule", "routes", "schedule"]

from types import SimpleNamespace  # THROWAWAY

SCHEDULES = {n: SimpleNamespace(words=n, runs=False, name=n) for n in SCHEDULES}
