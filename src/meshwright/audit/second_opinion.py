"""A search's best layouts, ranked again by the compiler of the hardware."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from meshwright.audit.compile.compile import compile_plan
from meshwright.audit.compile.target import Target
from meshwright.audit.compile.targets import TARGETS, choose_target
from meshwright.errors import AuditError, MeshwrightError, OutOfMemoryError
from meshwright.hardware.topology import Hardware
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan.chosen import plan_of
from meshwright.plan.rank import ranked
from meshwright.plan.train import Search
from meshwright.plan_file import Plan


@dataclass(frozen=True)
class Figures:
    """A compiler's figures for one plan.

    compiled_bytes, scheduled_seconds: None if unavailable. reason: why there are no bytes, or "". program: a
    hash of the compiled text; "" without one. is_final: another compile would give the same result; False if
    a compile took too long.
    """

    compiled_bytes: int | None
    scheduled_seconds: float | None
    reason: str = ""
    program: str = ""
    is_final: bool = True


def compiled_figures(
    plan: Plan, target: Target, progress: Callable[[str], None], *, use_cache: bool = True
) -> Figures:
    """The figures of `plan`, compiled by `target`.

    A refusal is a result too: its message is the reason.
    """
    # Reading programs is not needed to plan.
    from meshwright.audit.facts.buffers import chip_memory
    from meshwright.audit.hlo.read import parse_hlo
    from meshwright.audit.plan_audit import scheduled_seconds

    try:
        compiled = compile_plan(plan, target, progress, use_cache=use_cache)
        program = hashlib.sha256(compiled.hlo.encode()).hexdigest()
        memory = compiled.memory_bytes
        if memory and memory.get("host"):
            memory = chip_memory(memory, parse_hlo(compiled.hlo))
        scheduled = scheduled_seconds(plan, target, compiled)
    except OutOfMemoryError as error:
        return Figures(error.num_bytes, None, str(error))
    except MeshwrightError as error:
        return Figures(None, None, str(error), is_final=False)
    reason = "" if memory else f"{target.title} gives no figure"
    return Figures(memory["total"] if memory else None, scheduled, reason, program)


# Number of compiled layouts, and its maximum while none of them fits.
NUM_AUDITED, MAX_AUDITED = 3, 6


@dataclass(frozen=True)
class Opinion:
    """Planned and compiled memory of one layout on one chip, and seconds of its step.

    reason: why there is no compiled memory. scheduled_seconds: of the compiled schedule; None without a
    price.
    """

    layout: str
    planned_bytes: int
    compiled_bytes: int | None
    fits: bool
    compiler: str
    reason: str = ""
    planned_seconds: float | None = None
    scheduled_seconds: float | None = None

    def to_dict(self) -> dict:
        return asdict(self)


def second_opinion(
    config: ModelConfig,
    hardware: Hardware,
    search: Search,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Search, tuple[Opinion, ...]]:
    """The search with the compiled memory of its best layouts, and these figures.

    Layouts that do not fit are refused. Layouts that fit are ranked by the seconds of their compiled
    schedules, if known. The NUM_AUDITED best are compiled, and further ones, up to MAX_AUDITED, until one
    fits. Raises AuditError if the compiler of the hardware's chips is not installed.
    """
    target = _own_compiler(hardware, search.best)
    candidates, opinions = list(search.candidates), []
    for at, candidate in enumerate(search.candidates[:MAX_AUDITED]):
        if at >= NUM_AUDITED and any(one.fits and one.compiled_bytes is not None for one in opinions):
            break
        candidates[at], opinion = _asked(config, hardware, search.workload, candidate, target, progress)
        opinions.append(opinion)
    return replace(search, candidates=tuple(_by_schedule(ranked(candidates), opinions))), tuple(opinions)


def _by_schedule(candidates: list[Candidate], opinions: list[Opinion]) -> list[Candidate]:
    """The candidates; first the ones with a schedule that fits and has a price, by its seconds."""
    seconds = {one.layout: one.scheduled_seconds for one in opinions if one.fits}
    priced = [one for one in candidates if seconds.get(str(one.layout)) is not None]
    priced.sort(key=lambda opinion: seconds[str(opinion.layout)] or 0.0)
    return priced + [one for one in candidates if not any(one is first for first in priced)]


def _own_compiler(hardware: Hardware, best: Candidate) -> Target:
    """The compiler of the hardware's chips, since another's memory figures do not apply."""
    kind = hardware.chip.kind
    if kind not in TARGETS:
        raise AuditError(f"--audit has no compiler for {kind}; it has compilers for {', '.join(TARGETS)}")
    return choose_target(hardware.spec, best.layout, kind)


def _asked(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    candidate: Candidate,
    target: Target,
    progress: Callable[[str], None],
) -> tuple[Candidate, Opinion]:
    figures = compiled_figures(plan_of(config, hardware, workload, candidate), target, progress)
    compiled = replace(candidate, compiled_bytes=figures.compiled_bytes)
    return compiled, Opinion(
        str(candidate.layout),
        candidate.memory.total,
        figures.compiled_bytes,
        compiled.fits,
        target.title,
        figures.reason,
        candidate.step_seconds,
        figures.scheduled_seconds,
    )
