"""A job as a script for SLURM's sbatch."""

import shlex

from meshwright.errors import PlanError
from meshwright.launch.cluster_job import GRACE_SECONDS, PORT, ClusterJob


def slurm_script(job: ClusterJob, *, time_limit: str, partition: str | None, join_seconds: float) -> str:
    """The script: one process per GPU, or per node; if one fails all end, and the job is queued again.

    SLURM sends SIGTERM GRACE_SECONDS before the time limit, and the run then saves and ends. The job is
    queued again, as after a failure, up to `restarts` times. Raises PlanError for a plan on TPUs.
    """
    if not job.hardware.chip.platform.slurm:
        raise PlanError(f"{job.hardware.spec}: SLURM starts GPU jobs; for TPUs see mw launch k8s")
    directives = {
        "job-name": job.name,
        "nodes": str(job.num_nodes),
        "ntasks-per-node": "1" if job.is_alone else str(job.chips_per_node),
        "gpus-per-node": str(job.chips_per_node),
        "exclusive": None,
        "time": time_limit,
        "signal": f"TERM@{GRACE_SECONDS}",
        "requeue": None,
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    if partition:
        directives["partition"] = partition
    lines = [f"#SBATCH --{name}" + (f"={value}" if value else "") for name, value in directives.items()]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "set -u",
            "",
            "# Process 0 runs on the first node; each process reads its number from SLURM.",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f'export MESHWRIGHT_COORDINATOR="$first:{PORT}" MESHWRIGHT_JOIN_SECONDS={join_seconds:g}',
            f"srun --kill-on-bad-exit=1 {shlex.join(job.command)}",
            "code=$?",
            "",
            "# 0: done. 2: bad input, which another start does not mend. Else the run goes on.",
            'if [ "$code" = 0 ] || [ "$code" = 2 ]; then exit "$code"; fi',
            f'if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.restarts} ]; then',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )
