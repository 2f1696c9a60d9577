"""A job of a cluster: a command, and the number of nodes from the plan that the command names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.layout.runnable import machine_lacks
from meshwright.plan_file import load_plan

# Port of process 0, since launchers on clusters cannot look for a free one.
PORT = 8476
# Time for a checkpoint between the signal to a node and its end.
GRACE_SECONDS = 120


@dataclass(frozen=True)
class ClusterJob:
    """A command, the machine of its plan, and the maximum number of restarts.

    The command has --resume, so a cluster only has to start it again. is_alone: one process uses all chips of
    its node, as pipelines with a program for each stage need.
    """

    name: str
    command: tuple[str, ...]
    hardware: Hardware
    restarts: int
    is_alone: bool = False

    @property
    def chips_per_node(self) -> int:
        return min(self.hardware.chip.chips_per_host, self.hardware.num_chips // self.hardware.num_slices)

    @property
    def num_nodes(self) -> int:
        return self.hardware.num_chips // self.chips_per_node


def cluster_job(
    command: Sequence[str], name: str | None, restarts: int, *, resumes: bool = True
) -> ClusterJob:
    """The job of a command such as `mw train plan.toml --data DIR --run DIR`.

    resumes: whether it takes --resume. Raises PlanError if it names no plan with a machine, or one for
    virtual CPU devices.
    """
    plans = [Path(word) for word in command if word.endswith(".toml") and Path(word).is_file()]
    if not plans:
        raise PlanError("the command names no PLAN.toml that is here; mw launch reads the machine from it")
    plan = load_plan(plans[0])
    hardware = catalog.load(plan.hardware)
    if hardware.chip.platform.virtual:
        raise PlanError(f"{plans[0]}: is for {plan.hardware}, which is this machine: see mw launch local")
    alone = plan.layout.stage_programs
    if why := machine_lacks(plan.layout, hardware):
        raise PlanError(f"{plans[0]}: {why} does not run yet; fits: schedule=lanes, without offload on TPUs")
    resumed = [*command, *(["--resume"] if resumes and "--resume" not in command else [])]
    return ClusterJob(name or plan.model.name.replace(".", "-"), tuple(resumed), hardware, restarts, alone)
