"""Pipeline schedules in seconds: simulated, and in closed form for a search."""

from meshwright.cost.pipeline.makespan import in_flight, makespan
from meshwright.cost.pipeline.simulate import Event, PassSeconds, Timeline, Times, simulate

__all__ = ["Event", "PassSeconds", "Timeline", "Times", "in_flight", "makespan", "simulate"]
