"""What is audited of a plan, by its phase: the step as it is planned, and as JAX traces it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from meshwright.cost.inference import inference_cost
from meshwright.cost.priced import PricedCollective
from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Phase
from meshwright.plan.train import price
from meshwright.plan_file import Plan

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class PlannedStep:
    """The planned side of an audit; FLOPs are a device's, memory is bytes on one chip, by cause."""

    collectives: tuple[PricedCollective, ...]
    flops: float
    memory: Mapping[str, int]
    memory_total: int


def planned_step(plan: Plan, hardware: Hardware) -> PlannedStep:
    """The step of `plan` as the cost model has it."""
    workload = plan.workload
    if workload.phase == "train":
        candidate = price(plan.model, hardware, workload, plan.layout)
        cost, memory = candidate.cost, candidate.memory
    else:
        phase, size = cast(Phase, workload.phase), (workload.num_sequences, workload.seq_len)
        cost, memory = inference_cost(plan.model, plan.layout, hardware, phase, *size)
    return PlannedStep(cost.collectives, cost.executed_flops, asdict(memory), memory.total)


def traced_step(plan: Plan, mesh: "jax.sharding.Mesh | None") -> Any:
    """The step of `plan`, traced by JAX for `mesh`, or for the devices that there are."""
    import jax

    workload = plan.workload
    if workload.phase == "train":
        from meshwright.train.optimizer import OptimizerConfig
        from meshwright.train.step import CompiledStep

        optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=1, total_steps=2)
        step = CompiledStep(
            plan.model, plan.layout, workload, optimizer, chip_flops_per_second=1.0, mesh=mesh
        )
        arguments = step.abstract_state(), step.abstract_tokens()
    else:
        from meshwright.serve.step import InferenceStep

        step = InferenceStep(plan.model, plan.layout, workload, cast(Phase, workload.phase), mesh=mesh)
        arguments = step.abstract_arguments()
    with jax.set_mesh(step.mesh):
        return step.jitted.trace(*arguments)
