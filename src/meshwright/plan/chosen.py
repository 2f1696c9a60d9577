"""The plan of a candidate, as it is written and run."""

from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.train import Candidate, price
from meshwright.plan_file import Plan


def plan_of(config: ModelConfig, hardware: Hardware, workload: Workload, best: Candidate) -> Plan:
    """The plan of a candidate, its batch rounded to what the batch shards divide."""
    shards = best.layout.num_batch_shards * best.layout.microbatches
    whole = Workload(max(1, round(workload.num_sequences / shards)) * shards, workload.seq_len)
    run = best if whole == workload else price(config, hardware, whole, best.layout)
    planned = {"step_seconds": run.step_seconds, "mfu": run.mfu, "bytes_per_chip": run.memory.total}
    return Plan(config, hardware.spec, whole, best.layout, planned)
