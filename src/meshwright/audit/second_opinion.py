"""A search's best layouts, ranked again by the memory that the hardware's own compiler says they take."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from meshwright.audit.compile.compile import compile_plan
from meshwright.audit.compile.targets import TARGETS, Target, choose_target
from meshwright.errors import AuditError, MeshwrightError, OutOfMemoryError
from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan.chosen import plan_of
from meshwright.plan.rank import ranked
from meshwright.plan.train import Search

# How many of the best are compiled, and how many more until one of them fits.
NUM_AUDITED, MAX_AUDITED = 3, 6


@dataclass(frozen=True)
class Opinion:
    """Memory of one layout on one chip, planned and compiled; reason: why the latter is None."""

    layout: str
    planned_bytes: int
    compiled_bytes: int | None
    fits: bool
    compiler: str
    reason: str = ""

    def to_dict(self) -> dict:
        return asdict(self)


def second_opinion(
    config: ModelConfig,
    hardware: Hardware,
    found: Search,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Search, tuple[Opinion, ...]]:
    """The search with the compiled memory of its best, which refuses those that do not fit.

    The NUM_AUDITED best are compiled, and the next, up to MAX_AUDITED, until one fits. Raises AuditError
    where the compiler of the hardware's chips is not there.
    """
    target = _own_compiler(hardware, found.best)
    candidates, opinions = list(found.candidates), []
    for at, candidate in enumerate(found.candidates[:MAX_AUDITED]):
        if at >= NUM_AUDITED and any(one.fits and one.compiled_bytes is not None for one in opinions):
            break
        candidates[at], opinion = _asked(config, hardware, found.workload, candidate, target, progress)
        opinions.append(opinion)
    return replace(found, candidates=tuple(ranked(candidates))), tuple(opinions)


def _own_compiler(hardware: Hardware, best: Candidate) -> Target:
    """The compiler of the hardware's chips: that of another tells nothing of their memory."""
    kind = hardware.chip.kind
    if kind not in TARGETS:
        raise AuditError(f"--audit knows no compiler for a {kind}; it has those of {', '.join(TARGETS)}")
    return choose_target(hardware.spec, best.layout, kind)


def _asked(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    candidate: Candidate,
    target: Target,
    progress: Callable[[str], None],
) -> tuple[Candidate, Opinion]:
    reason, compiled = "", None
    try:
        plan = plan_of(config, hardware, workload, candidate)
        memory = compile_plan(plan, target, progress).memory_bytes
        if memory:
            compiled = memory["total"]
        else:
            reason = f"{target.compiler} gives no figure"
    except MeshwrightError as error:
        compiled = error.num_bytes if isinstance(error, OutOfMemoryError) else None
        reason = str(error)
    asked = replace(candidate, compiled_bytes=compiled)
    layout, planned = str(candidate.layout), candidate.memory.total
    return asked, Opinion(layout, planned, compiled, asked.fits, target.compiler, reason)
