"""The program that moves a model's weights, compiled without chips: planned and emitted."""

import json
import os
import pickle
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.audit.compile.child import report_of
from meshwright.audit.compile.target import Target
from meshwright.cost.reshard_seconds import sent_bytes
from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.nn.start.devices import flags_with_devices
from meshwright.notation.collective import gathered_of_block

# If emitted and planned bytes differ by more than this share, the plan or the program is wrong.
TOLERANCE = 0.02
_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class ReshardJob:
    """The move of a model's weights between two layouts on a machine."""

    config: ModelConfig
    before: Layout
    after: Layout
    hardware: str


def audit_reshard(job: ReshardJob, target: Target) -> dict[str, Any]:
    """The bytes that one device sends, planned and emitted, by operation and in total.

    Compiled in a process of its own, with the layouts' number of virtual devices. Raises AuditError if
    the program does not compile.
    """
    environment = {**os.environ, **target.environment}
    if not target.topology:
        environment["XLA_FLAGS"] = flags_with_devices(job.before.mesh.num_devices)
    move = f"the move from {job.before} to {job.after}"
    return report_of(
        "meshwright.audit.moved_weights",
        environment=environment,
        seconds=_TIMEOUT_SECONDS,
        slow=f"{move}: compiling took",
        failed=f"{move} does not compile",
        given=pickle.dumps((job, asdict(target))),
    )


def _compiled_here(job: ReshardJob, target: Target) -> dict[str, Any]:
    """The document of `audit_reshard`, in a process in which JAX has enough devices."""
    import jax

    from meshwright.audit.compile.targets import target_mesh
    from meshwright.audit.facts.communication import collectives
    from meshwright.audit.facts.emitted import on_mesh
    from meshwright.audit.hlo.read import parse_hlo
    from meshwright.nn.start.device_mesh import device_mesh
    from meshwright.reinforcement.weights_mover import WeightsMover

    mesh = target_mesh(target, job.before) or device_mesh(job.before)
    mover = WeightsMover(job.config, job.before, job.after, mesh, catalog.load(job.hardware))
    with jax.set_mesh(mover.shared):
        lowered = mover.jitted.trace(mover.abstract()).lower(lowering_platforms=(target.compiler.lowering,))
        compiled = lowered.compile(compiler_options=dict(target.compiler.options) or None)
    text = compiled.as_text()
    assert text, "XLA keeps the text of a compiled program"
    shared = mover.plan.shared.mesh
    emitted: Counter[str] = Counter()
    for each in (on_mesh(one, shared) for one in collectives(parse_hlo(text))):
        num_devices = shared.size(each.axes)
        times = each.collective.count
        assert times is not None, "a move has no loops"
        emitted[each.op] += round(times * sent_bytes(each.op, each.gathered_bytes, num_devices))
    planned: Counter[str] = Counter()
    for move in mover.plan.moves:
        for step, block in zip(move.reshard.steps, move.reshard.block_bytes, strict=False):
            num_devices = shared.size(step.axes)
            gathered = gathered_of_block(step.op, block, num_devices)
            planned[step.op] += round(sent_bytes(step.op, gathered, num_devices))
    operations = [
        {"op": op, "planned_bytes": planned[op], "emitted_bytes": emitted[op]}
        for op in sorted({*planned, *emitted})
        if planned[op] or emitted[op]
    ]
    totals = {"planned_bytes": sum(planned.values()), "emitted_bytes": sum(emitted.values())}
    difference = abs(totals["emitted_bytes"] - totals["planned_bytes"])
    return {
        "compiler": target.title,
        "operations": operations,
        **totals,
        "differs": difference > TOLERANCE * totals["planned_bytes"],
    }


if __name__ == "__main__":
    given, described = pickle.load(sys.stdin.buffer)
    print(json.dumps(_compiled_here(given, Target(**described))))
