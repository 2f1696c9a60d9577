"""A contraction or a reshard on devices, compared with the dense result and derived collectives.

The number of virtual devices is fixed when JAX starts, so a job with more devices than this process runs in a
separate process.
"""

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from meshwright.audit.compile.child import report_of
from meshwright.audit.shard.shard_job import ShardJob
from meshwright.cost.strategy import Strategy
from meshwright.dtypes import dtype_bytes, number_type, types_for
from meshwright.errors import AuditError
from meshwright.nn.start.devices import flags_with_devices
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective
from meshwright.notation.mesh import Mesh
from meshwright.units import format_bytes

RUN_DTYPES = tuple(name for name in types_for("operands") if number_type(name).scales is None)
# A run within these limits takes some seconds on a laptop; bytes and FLOPs are of all virtual devices
# together.
MAX_DEVICES = 64
MAX_FLOPS = 2e12
MAX_BYTES = 2e9
RUN_TIMEOUT_SECONDS = 300


def run_strategy(strategy: Strategy, *, gradients: bool = False) -> dict[str, Any]:
    """The run of a priced strategy (`run_job`), which overlaps a transfer with the product as planned.

    With `gradients` also gradient_max_abs_errors (by operand, against the dense gradients of a random
    cotangent) and gradient_emitted[], the collectives of both gradients.
    """
    q = strategy.question
    return run_job(ShardJob(strategy.contraction, (), strategy.window, q.mesh, q.sizes, q.dtype, gradients))


def run_reshard(
    steps: Sequence[Collective], mesh: Mesh, sizes: Mapping[str, int], dtype: str
) -> dict[str, Any]:
    """The run of a reshard's steps; empty without steps."""
    if not steps:
        return {"max_abs_error": 0.0, "emitted": [], "derived": [], "pairs": []}
    return run_job(ShardJob(None, tuple(steps), None, mesh, sizes, dtype))


def run_job(job: ShardJob) -> dict[str, Any]:
    """The result of a job with random operands on devices, compared with the dense product.

    max_abs_error: the largest difference on any device. emitted[], derived[]: collectives, each with op, axes
    and bytes. pairs[]: collectives that belong together, with a status (match, equivalent, differs). Raises
    AuditError if the run is too large for this machine or the dtype cannot be multiplied.
    """
    _check(job)
    return _run_locally(job) if _num_local_devices() >= job.mesh.num_devices else _run_in_process(job)


def _check(job: ShardJob) -> None:
    if job.dtype not in RUN_DTYPES:
        raise AuditError(f"{job.dtype} is not run; fits: {', '.join(RUN_DTYPES)}")
    if job.mesh.num_devices > MAX_DEVICES:
        raise AuditError(
            f"{job.mesh} has {job.mesh.num_devices} devices; fits: at most {MAX_DEVICES} virtual ones"
        )
    flops = job.plan.flops_per_device(job.mesh, job.sizes) * job.mesh.num_devices if job.plan else 0
    if flops > MAX_FLOPS:
        raise AuditError(
            f"a run of {flops:.3g} FLOPs is too long here; fits: {MAX_FLOPS:.3g}, at smaller sizes"
        )
    arrays = [*job.operands, job.result, *(step.result for step in job.steps)]
    largest = max(_block_bytes(array, job) for array in arrays) * job.mesh.num_devices
    if largest > MAX_BYTES:
        raise AuditError(
            f"a run holds {format_bytes(largest)} of one array on all devices together; "
            f"fits: {format_bytes(MAX_BYTES)}, at smaller sizes"
        )


def _block_bytes(array: ShardedArray, job: ShardJob) -> float:
    return prod(array.local_shape(job.mesh, job.sizes)) * dtype_bytes(job.dtype)


def _num_local_devices() -> int:
    """Devices of this process; 0 before JAX is imported, which takes a second."""
    jax = sys.modules.get("jax")
    return len(jax.devices()) if jax else 0


def _run_in_process(job: ShardJob) -> dict[str, Any]:
    """The report of a separate process with enough virtual devices."""
    flags = flags_with_devices(job.mesh.num_devices)
    return report_of(
        "meshwright.audit.shard.execution",
        environment={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        seconds=RUN_TIMEOUT_SECONDS,
        slow=f"{job.result} takes too long to run at its sizes:",
        failed=f"{job.result} does not run",
        given=pickle.dumps(job),
    )


def _run_locally(job: ShardJob) -> dict[str, Any]:
    from meshwright.audit.shard.execution import execute  # JAX, which planning must not need

    return execute(job)
