"""Changes of a plan, each tried on the best before it by compiling for the plan's hardware.

A change is taken if its step is faster by more than the price can tell, or fits where the best does not.
Steps are compared by their compiled schedules, where the compiler prints what tells their time, else by the
plan.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from meshwright.audit.compile.cache import content_key
from meshwright.audit.compile.targets import Target, choose_target
from meshwright.audit.figures import Figures, figures
from meshwright.audit.tune.neighbours import neighbours, remats
from meshwright.audit.tune.options import OPTIONS
from meshwright.errors import MeshwrightError, PlanError
from meshwright.files import cache_folder, write_whole
from meshwright.hardware.catalog import load
from meshwright.plan.rank import TIE
from meshwright.plan.train import price
from meshwright.plan_file import Plan

# Layouts near the best that are compiled: those that the plan prices lowest.
NUM_NEAR = 4
AS_PLANNED = "as planned"
# Verdicts of a trial beside the best before it.
FASTER, SLOWER, FITS = "faster", "slower", "fits"
SAME, ALIKE = "same program", "no difference"
DOES_NOT_FIT, REFUSED = "does not fit", "refused"


@dataclass(frozen=True)
class Trial:
    """One change and what it gave.

    change: in words of the layout or of XLA's options. over: the trial that it changes. bytes_per_chip: the
    compiler's, where it is that of the plan's chips, else the plan's; None where it refused. gain: the share
    of the step by which it is faster than `over`, None where either has no price. reason: why it has no
    figures.
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
    """The trials in their order, the best of them, and its plan. compiler: who compiled."""

    trials: tuple[Trial, ...]
    best: Trial
    plan: Plan
    compiler: str

    def to_dict(self) -> dict:
        """The keys of `mw tune`. priced_by: `schedule`, or `plan` where no compiled schedule has a price."""
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
    """The trials of a training plan: remat policies, layouts near the best of these, then XLA's options.

    target: as for `audit_plan`. num_trials: at most so many. Each trial's figures are kept by content as soon
    as they are known, so that a run that was cut off goes on where it was. Raises PlanError for a plan of
    another phase, AuditError where the target cannot compile the plan's layout.
    """
    if plan.workload.phase != "train":
        raise PlanError(f"mw tune takes plans of training; this plan has phase {plan.workload.phase!r}")
    chosen = choose_target(plan.hardware, plan.layout, target)
    tuner = _Tuner(plan, chosen, progress, use_cache=use_cache)
    for change, changed in islice(tuner.changes(), num_trials):
        tuner.try_out(change, changed)
    return tuner.result()


class _Tuner:
    """The best so far, and what comes next."""

    def __init__(
        self, plan: Plan, target: Target, progress: Callable[[str], None], *, use_cache: bool
    ) -> None:
        self.best_plan, self.target, self.progress, self.use_cache = plan, target, progress, use_cache
        self.hardware = load(plan.hardware)
        self.is_own_compiler = target.name == self.hardware.chip.kind
        self.trials: list[Trial] = []
        self.best: Trial | None = None

    def changes(self) -> Iterator[tuple[str, Plan]]:
        """Each change in words, applied to the best at its time."""
        yield AS_PLANNED, self.best_plan
        yield from self._layouts(remats(self.best_plan))
        yield from self._layouts(neighbours(self.best_plan)[:NUM_NEAR])
        assert self.best, "the plan itself was tried first"
        # Where the schedule has no price, nothing tells what an option gives.
        known = OPTIONS.get(self.target.name, ()) if self.best.scheduled_seconds is not None else ()
        for options in known:
            if not options.items() <= self.best_plan.compiler.items():
                words = " ".join(f"{name}={json.dumps(value)}" for name, value in options.items())
                yield words, replace(self.best_plan, compiler={**self.best_plan.compiler, **options})

    def _layouts(self, plans: Iterable[Plan]) -> Iterator[tuple[str, Plan]]:
        for one in plans:
            yield _difference(str(self.best_plan.layout), str(one.layout)), one

    def try_out(self, change: str, plan: Plan) -> None:
        trial = self._judged(change, plan)
        self.trials.append(trial)
        if self.best is None or trial.verdict in (FASTER, FITS):
            self.best, self.best_plan = trial, plan

    def _judged(self, change: str, plan: Plan) -> Trial:
        planned = price(plan.model, self.hardware, plan.workload, plan.layout)
        found = self._figures(plan)
        num_bytes = found.compiled_bytes if self.is_own_compiler else planned.memory.total
        trial = Trial(
            change=change,
            over=self.best.change if self.best else "",
            layout=str(plan.layout),
            compiler=dict(plan.compiler),
            planned_seconds=planned.step_seconds,
            scheduled_seconds=found.scheduled_seconds,
            bytes_per_chip=num_bytes,
            fits=bool(found.program) and (num_bytes or 0) <= self.hardware.chip.program_bytes,
            verdict="",
            gain=None,
            reason=found.reason,
            program=found.program,
        )
        gain = _gain(trial, self.best) if self.best else None
        return replace(trial, verdict=_verdict(trial, self.best, gain), gain=gain)

    def _figures(self, plan: Plan) -> Figures:
        """The figures of a plan: those kept of a trial before, else of a compile."""
        try:
            target = choose_target(plan.hardware, plan.layout, self.target.name)
        except MeshwrightError as error:
            return Figures(None, None, str(error))
        kept = _file_of(plan, target)
        if self.use_cache and kept.exists():
            self.progress(f"read what {target.compiler} made of {plan.layout} before")
            return Figures(**json.loads(kept.read_text(encoding="utf-8")))
        found = figures(plan, target, self.progress, use_cache=self.use_cache)
        if self.use_cache and found.is_final:
            write_whole(kept, json.dumps(asdict(found)))
        return found

    def result(self) -> Tuning:
        """The trials, and the best's plan with them in it."""
        assert self.best, "the plan itself was tried first"
        best = price(self.best_plan.model, self.hardware, self.best_plan.workload, self.best_plan.layout)
        planned = {"step_seconds": best.step_seconds, "mfu": best.mfu, "bytes_per_chip": best.memory.total}
        tuned = tuple(one.to_dict() for one in self.trials)
        plan = replace(self.best_plan, planned=planned, tuned=tuned)
        return Tuning(tuple(self.trials), self.best, plan, self.target.compiler)


def _file_of(plan: Plan, target: Target) -> Path:
    return cache_folder() / "trials" / f"{content_key(plan, target)}.json"


def _gain(trial: Trial, best: Trial) -> float | None:
    """The share of the best's step by which a trial's is shorter; None where one has no price by its schedule
    and the other has.
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
        return FITS
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
