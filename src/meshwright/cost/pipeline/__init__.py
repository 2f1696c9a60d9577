"""Pipeline schedules in seconds: simulated, and bounded from below for a search."""

from meshwright.cost.pipeline.bound import least_makespan
from meshwright.cost.pipeline.hops import Hops, hops, sent_hops
from meshwright.cost.pipeline.makespan import makespan
from meshwright.cost.pipeline.order import PassSeconds, Times
from meshwright.cost.pipeline.simulate import PassEvent, PipelineTimeline, simulate

__all__ = [
    "Hops",
    "PassEvent",
    "PassSeconds",
    "PipelineTimeline",
    "Times",
    "hops",
    "least_makespan",
    "makespan",
    "sent_hops",
    "simulate",
]
