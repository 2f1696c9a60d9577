"""The plan of a candidate, as it is written and run."""

from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan_file import Plan


def plan_of(config: ModelConfig, hardware: Hardware, workload: Workload, best: Candidate) -> Plan:
    """The plan of a candidate, with the figures that were priced for its workload."""
    planned = {"step_seconds": best.step_seconds, "mfu": best.mfu, "bytes_per_chip": best.memory.total}
    return Plan(config, hardware.spec, workload, best.layout, planned)
