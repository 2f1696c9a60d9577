"""The plan of a candidate, as it is written and run."""

from collections.abc import Mapping

from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan_file import Plan


def plan_of(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    best: Candidate,
    asked: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of a candidate, with the figures that were priced for its workload.

    asked: the conditions and the software that it was asked for.
    """
    planned = {"step_seconds": best.step_seconds, "mfu": best.mfu, "bytes_per_chip": best.memory.total}
    return Plan(config, hardware.spec, workload, best.layout, planned, asked=asked or {})
