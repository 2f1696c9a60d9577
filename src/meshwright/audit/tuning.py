"""Changes of a plan, each tried on the best plan so far by compiling for the plan's hardware.

The changes are the remat policies that run, the layouts near the best of them, then XLA's options. A change
is taken if its step is faster by more than the price's resolution, or if it fits and the best does not. Steps
are compared by their compiled schedules if the compiler prints its instructions' times, otherwise by the
plan.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from meshwright.audit.compile.cache import content_key
from meshwright.audit.compile.target import Target
from meshwright.audit.compile.targets import choose_target
from meshwright.audit.second_opinion import Figures, compiled_figures
from meshwright.errors import MeshwrightError, PlanError
from meshwright.files import cache_folder, write_whole
from meshwright.hardware.catalog import load
from meshwright.layout import MULTIPLIED, REMATS, Layout
from meshwright.layout.runnable import why_not
from meshwright.plan.candidate import Candidate
from meshwright.plan.rank import TIE
from meshwright.plan.space import different_remats
from meshwright.plan.train import price
from meshwright.plan_file import Plan
from meshwright.units import divisors

# Layouts that exceed the memory by at most this factor of the plan are compiled too: the compiled memory of
# whole steps is 0.7 to 1.3 of the planned (docs/how-to/read-an-audit.md, the matrix).
_MEMORY_MARGIN = 1.2
_ZERO_STAGES = (0, 1, 2)


def remats(plan: Plan) -> Iterator[Plan]:
    """The plan under each other remat policy that runs and changes the program."""
    for remat in different_remats(plan.model, load(plan.hardware), REMATS):
        layout = plan.layout.replace(remat=remat)
        if remat != plan.layout.schedule.remat and why_not(plan.model, layout) is None:
            yield replace(plan, layout=layout)


def neighbours(plan: Plan) -> list[Plan]:
    """The layouts one step from the plan's that run, by planned step time.

    Each has its fastest remat policy that fits, or nearly does, by the plan. A step moves a factor from one
    mesh axis to another, halves or doubles the microbatches, changes the ZeRO stage, or switches sequence
    parallelism. A layout without a short form has no neighbours.
    """
    if plan.layout.form is None:
        return []
    by_layout: dict[str, tuple[float, Plan]] = {}
    for layout in _steps(plan.layout):
        best = _fastest(plan, layout)
        if best and best.layout != plan.layout:
            near = replace(plan, layout=best.layout)
            by_layout.setdefault(str(best.layout), (best.step_seconds, near))
    return [near for _, near in sorted(by_layout.values(), key=lambda pair: pair[0])]


def _fastest(plan: Plan, layout: Layout) -> Candidate | None:
    """The layout with its fastest remat policy by the plan; None if it fits in none."""
    hardware, candidates = load(plan.hardware), []
    for remat in different_remats(plan.model, hardware, REMATS):
        changed = layout.replace(remat=remat)
        try:
            if why_not(plan.model, changed) is None and not changed.stage_programs:
                candidates.append(price(plan.model, hardware, plan.workload, changed))
        except MeshwrightError:  # it does not divide the model, the batch or the sequence
            continue
    usable = _MEMORY_MARGIN * hardware.chip.program_bytes
    fitting = [one for one in candidates if one.memory.total <= usable]
    return min(fitting, key=lambda trial: trial.step_seconds, default=None)


def _steps(layout: Layout) -> Iterator[Layout]:
    """The layouts one step away; impossible ones are left out."""
    words = [
        *_moved(layout),
        *({"microbatches": count} for count in _halved_and_doubled(layout.schedule.microbatches)),
        *({"zero": stage} for stage in _ZERO_STAGES if layout.data > 1 and stage != layout.rules.zero_stage),
        {"sequence_parallel": not layout.word("sequence_parallel")},
    ]
    for change in words:
        try:
            yield layout.replace(**change)
        except MeshwrightError:
            continue


def _moved(layout: Layout) -> Iterator[dict[str, int]]:
    """The smallest factor of one degree, moved to another."""
    for source in (axis for axis in MULTIPLIED if layout.degree(axis) > 1):
        degree = layout.degree(source)
        factor = divisors(degree)[1]
        for goal in (axis for axis in MULTIPLIED if axis != source):
            yield {source: degree // factor, goal: layout.degree(goal) * factor}


def _halved_and_doubled(count: int) -> Iterator[int]:
    yield 2 * count
    if count % 2 == 0:
        yield count // 2


# Number of compiled layouts near the best: the fastest by the plan.
NUM_NEAR = 4
AS_PLANNED = "as planned"
# Verdicts of a trial against the best before it.
FASTER, SLOWER, _FITS = "faster", "slower", "fits"
SAME, ALIKE = "same program", "no difference"
DOES_NOT_FIT, REFUSED = "does not fit", "refused"


@dataclass(frozen=True)
class Trial:
    """One change and its result.

    change: in words of the layout or of XLA's options. over: the trial that it changes. bytes_per_chip: of
    the plan's own compiler, otherwise of the plan; None if the compiler refused. gain: share of the step by
    which it is faster than `over`; None if either has no price. reason: why it has no figures.
    """

    change: str
    over: str
    layout: str
    compiler: Mapping[str, bool | int | str]
    planned_seconds: float
    scheduled_seconds: float | None
    bytes_per_chip: int | None
    fits: bool
    verdict: str
    gain: float | None
    reason: str
    program: str

    @property
    def seconds(self) -> float:
        return self.planned_seconds if self.scheduled_seconds is None else self.scheduled_seconds

    def to_dict(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "program"}


@dataclass(frozen=True)
class Tuning:
    """The trials in order, the best of them, and its plan. compiler: the compiler's title."""

    trials: tuple[Trial, ...]
    best: Trial
    plan: Plan
    compiler: str

    def to_dict(self) -> dict:
        """The keys of `mw tune`. priced_by: `schedule`, or `plan` if no schedule has a price."""
        return {
            "trials": [one.to_dict() for one in self.trials],
            "best": self.best.to_dict(),
            "compiler": self.compiler,
            "priced_by": "schedule" if any(one.scheduled_seconds for one in self.trials) else "plan",
            "resolution": TIE,
        }


def tune(
    plan: Plan,
    target: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    *,
    num_trials: int | None = None,
    use_cache: bool = True,
) -> Tuning:
    """The trials of a training plan, in order.

    They are remat policies, layouts near the best of them, then XLA's options. target: as for `audit_plan`.
    num_trials: the maximum. Each trial's figures are stored by content as soon as they are known, so that an
    interrupted run continues. Raises PlanError for a plan of another phase, AuditError if the target cannot
    compile the plan's layout.
    """
    if plan.workload.phase != "train":
        raise PlanError(f"mw tune takes plans of training; this plan has phase {plan.workload.phase!r}")
    chosen = choose_target(plan.hardware, plan.layout, target)
    tuner = _Tuner(plan, chosen, progress, use_cache=use_cache)
    for change, changed in islice(tuner.changes(), num_trials):
        tuner.try_out(change, changed)
    return tuner.result()


class _Tuner:
    """The best plan so far, and the further changes."""

    def __init__(
        self, plan: Plan, target: Target, progress: Callable[[str], None], *, use_cache: bool
    ) -> None:
        self.best_plan, self.target, self.progress, self.use_cache = plan, target, progress, use_cache
        self.hardware = load(plan.hardware)
        self.is_own_compiler = target.is_of(self.hardware.chip)
        self.trials: list[Trial] = []
        self.best: Trial | None = None

    def changes(self) -> Iterator[tuple[str, Plan]]:
        """Each change in words, applied to the best plan at its time."""
        yield AS_PLANNED, self.best_plan
        yield from self._layouts(remats(self.best_plan))
        yield from self._layouts(neighbours(self.best_plan)[:NUM_NEAR])
        assert self.best, "the plan itself was tried first"
        # Without a price of the schedule the gain of an option is unknown.
        known = self.target.compiler.tuned_options if self.best.scheduled_seconds is not None else ()
        for options in known:
            if not options.items() <= self.best_plan.compiler.items():
                words = " ".join(f"{name}={json.dumps(value)}" for name, value in options.items())
                yield words, replace(self.best_plan, compiler={**self.best_plan.compiler, **options})

    def _layouts(self, plans: Iterable[Plan]) -> Iterator[tuple[str, Plan]]:
        for plan in plans:
            yield _difference(str(self.best_plan.layout), str(plan.layout)), plan

    def try_out(self, change: str, plan: Plan) -> None:
        trial = self._judged(change, plan)
        self.trials.append(trial)
        if self.best is None or trial.verdict in (FASTER, _FITS):
            self.best, self.best_plan = trial, plan

    def _judged(self, change: str, plan: Plan) -> Trial:
        planned = price(plan.model, self.hardware, plan.workload, plan.layout)
        figures = self._figures(plan)
        num_bytes = figures.compiled_bytes if self.is_own_compiler else planned.memory.total
        trial = Trial(
            change=change,
            over=self.best.change if self.best else "",
            layout=str(plan.layout),
            compiler=dict(plan.compiler),
            planned_seconds=planned.step_seconds,
            scheduled_seconds=figures.scheduled_seconds,
            bytes_per_chip=num_bytes,
            fits=bool(figures.program) and (num_bytes or 0) <= self.hardware.chip.program_bytes,
            verdict="",
            gain=None,
            reason=figures.reason,
            program=figures.program,
        )
        gain = _gain(trial, self.best) if self.best else None
        return replace(trial, verdict=_verdict(trial, self.best, gain), gain=gain)

    def _figures(self, plan: Plan) -> Figures:
        """The figures of a plan: stored ones of an earlier trial, otherwise of a compile."""
        try:
            target = choose_target(plan.hardware, plan.layout, self.target.name)
        except MeshwrightError as error:
            return Figures(None, None, str(error))
        kept = _file_of(plan, target)
        if self.use_cache and kept.exists():
            self.progress(f"read what {target.title} made of {plan.layout} before")
            return Figures(**json.loads(kept.read_text(encoding="utf-8")))
        figures = compiled_figures(plan, target, self.progress, use_cache=self.use_cache)
        if self.use_cache and figures.is_final:
            write_whole(kept, json.dumps(asdict(figures)))
        return figures

    def result(self) -> Tuning:
        """The trials, and the best plan with the trials in it."""
        assert self.best, "the plan itself was tried first"
        best = price(self.best_plan.model, self.hardware, self.best_plan.workload, self.best_plan.layout)
        planned = {"step_seconds": best.step_seconds, "mfu": best.mfu, "bytes_per_chip": best.memory.total}
        tuned = tuple(one.to_dict() for one in self.trials)
        plan = replace(self.best_plan, planned=planned, tuned=tuned)
        return Tuning(tuple(self.trials), self.best, plan, self.target.title)


def _file_of(plan: Plan, target: Target) -> Path:
    return cache_folder() / "trials" / f"{content_key(plan, target)}.json"


def _gain(trial: Trial, best: Trial) -> float | None:
    """The time that a trial's step saves, as a share of the best's.

    None if only one of them has a price by its schedule.
    """
    if not trial.program or (trial.scheduled_seconds is None) != (best.scheduled_seconds is None):
        return None
    return 1 - trial.seconds / best.seconds


def _verdict(trial: Trial, best: Trial | None, gain: float | None) -> str:
    if not trial.program:
        return DOES_NOT_FIT if trial.bytes_per_chip else REFUSED
    if not trial.fits:
        return DOES_NOT_FIT
    if best is None:
        return AS_PLANNED
    if not best.fits:
        return _FITS
    if trial.program == best.program:
        return SAME
    if gain is None or abs(gain) <= TIE:
        return ALIKE
    return FASTER if gain > 0 else SLOWER


def _difference(before: str, after: str) -> str:
    """The words of two layouts that differ.

    >>> _difference("fsdp=8,remat=none", "fsdp=4,tensor=2,remat=none")
    'fsdp=4,tensor=2 in place of fsdp=8'
    """
    old, new = before.split(","), after.split(",")
    gone = ",".join(word for word in old if word not in new)
    come = ",".join(word for word in new if word not in old)
    return f"{come} in place of {gone}" if come and gone else come or f"without {gone}"
