"""Results of the library: ranked layouts, and single layouts to explain, save, audit or train with."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api.document import heading, plan_document, write_plan
from meshwright.api.inputs import Train
from meshwright.errors import PlanError
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan.chosen import plan_of
from meshwright.plan.explain.explanation import Explanation, explain
from meshwright.plan.explain.fitting import Change, cheapest_fit
from meshwright.plan.launch_settings import LaunchSettings, launch_settings
from meshwright.plan.smallest import Smallest
from meshwright.plan.train import Search
from meshwright.plan.verdict import asked_of
from meshwright.plan_file import Plan
from meshwright.progress import Progress
from meshwright.units import parse_count

if TYPE_CHECKING:
    from meshwright.audit.second_opinion import Opinion
    from meshwright.train.run import TrainingResult


@dataclass(frozen=True, repr=False)
class PricedLayout:
    """A layout to train `model` with on `hardware`, and its price. search: this layout is its best.

    >>> import meshwright as mw
    >>> fsdp = mw.price("llama-3-8b", "v5e:4x4", mw.Train("1Mi", "4k"), "fsdp=16,microbatches=8,remat=full")
    >>> fsdp.fits, fsdp.bound, round(fsdp.mfu, 1)
    (True, 'compute', 0.5)
    """

    model: ModelConfig
    hardware: Hardware
    work: Train
    search: Search

    @property
    def workload(self) -> Workload:
        """The batch that is planned: of whole sequences, the nearest to `work` that divides."""
        return self.search.workload

    @property
    def candidate(self) -> Candidate:
        """The layout with all parts of its price."""
        return self.search.best

    @property
    def layout(self) -> Layout:
        """The splits of all arrays, and the schedule."""
        return self.candidate.layout

    @property
    def step_seconds(self) -> float:
        """Seconds of an optimizer step over the whole batch."""
        return self.candidate.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs over the chips' dense peak; recomputation is not counted."""
        return self.candidate.mfu

    @property
    def fits(self) -> bool:
        """Whether the layout fits the memory of a chip."""
        return self.candidate.fits

    @property
    def bound(self) -> str:
        """The resource with the largest share of the step: compute, hbm, ici, dcn, bubble or launch."""
        return self.candidate.cost.bound

    @property
    def bytes_per_chip(self) -> dict[str, int]:
        """Bytes of a chip at the peak, by cause, and their "total"."""
        return self.candidate.memory.to_dict()

    def __repr__(self) -> str:
        return f"PricedLayout({self.candidate})"

    def to_dict(self) -> dict:
        """The keys of a candidate of `mw plan train --json`, without `tie`, which only rankings have."""
        return self.candidate.to_dict()

    def explain(
        self, *, tokens: int | str | None = None, critical_batch: int | str | None = None
    ) -> Explanation:
        """The layout in words: its splits, its step time by cause, alternatives and possible changes.

        tokens: of the whole run, for its days and price. critical_batch: tokens, compared with the batch.
        """
        return explain(
            self.model,
            self.hardware,
            self.search,
            num_tokens=None if tokens is None else parse_count(tokens),
            critical_tokens=None if critical_batch is None else parse_count(critical_batch),
        )

    def cheapest_fit(self) -> Change | None:
        """The cheapest change that makes the layout fit; None if there is none."""
        return cheapest_fit(self.model, self.hardware, self.workload, self.candidate)

    @cached_property
    def plan(self) -> Plan:
        """The plan to save, train and audit. Raises PlanError if the layout does not fit."""
        if not self.fits:
            raise PlanError(f"{self.model.name} on {self.hardware.spec}: {self.candidate}")
        asked = asked_of(self.search, self.hardware)
        return plan_of(self.model, self.hardware, self.workload, self.candidate, asked)

    @property
    def launch(self) -> LaunchSettings | None:
        """The settings of the software that the plan is for; None for `mw train`."""
        launcher = self.search.launcher
        if launcher is None or not self.fits:
            return None
        return launch_settings(launcher, self.model, self.layout, self.workload, self.hardware)

    @property
    def alone(self) -> "Plans":
        """A ranking with only this layout."""
        return Plans(self.model, self.hardware, self.work, self.search, 1)

    def save(self, path: str | Path) -> Path:
        """Write plan.toml for `mw train`, `mw audit` and `mw report`, and its figures as .json next to it.

        Raises PlanError if the layout does not fit, or the path is not for a TOML.
        """
        return self.alone.save(path)

    def audit(
        self, target: str | None = None, *, numerics: bool = True, progress: Progress | None = None
    ) -> dict:
        """A comparison of the compiled step with the plan: the keys of `mw audit --json`, `verdict` first.

        target: the compiler, "tpu", "gpu" or "cpu"; by default the hardware's if it is installed. No chip
        needs to be attached. numerics: also compare a tiny twin's numbers with plain formulas.
        """
        from meshwright.audit.plan_audit import audit_plan

        say = progress or _silent
        return audit_plan(self.plan, target, lambda what: say(what, None), numerics=numerics)

    def train(
        self,
        data: str | Path | None = None,
        *,
        run: str | Path | None = None,
        steps: int | str | None = None,
        resume: bool = False,
        learning_rate: float | None = None,
        seed: int | None = None,
        progress: Progress | None = None,
    ) -> "TrainingResult":
        """Train with this layout in this process, as `mw train` does.

        data: a folder, a .txt, .py, .jsonl or .parquet file, "stories" or "stdlib"; a resumed run keeps its
        data. run: the run's folder, by default runs/MODEL. steps: the last step, by default one epoch. None
        is the run's setting, or the command's default. JAX must see the layout's devices, so on a CPU call
        this before JAX has started. Raises DeviceError if JAX does not see them.
        """
        from meshwright.nn.start.devices import use_devices_of
        from meshwright.train.job import RunOptions, prepare_job

        given = {
            "data": None if data is None else str(data),
            "steps": None if steps is None else parse_count(steps),
            "learning_rate": learning_rate,
            "seed": seed,
        }
        options = RunOptions(run=None if run is None else Path(run), resume=resume)
        job = prepare_job(self.plan, json.dumps(self.alone.to_dict(), indent=1), options, given)
        for sentence in job.notes:
            warnings.warn(sentence, stacklevel=2)
        use_devices_of(self.hardware)
        from meshwright.train.run import carry_out

        return carry_out(job, progress or _silent)


@dataclass(frozen=True, repr=False)
class Plans:
    """The layouts of one search, best first; its repr is the table.

    top: number of rows of the table. sizing: the sizes that `smallest` tried. opinions: the compiler's memory
    and schedule of the best layouts, from `audited`.

    >>> import meshwright as mw
    >>> plans = mw.plan("llama-3-8b", "v5e:4x4", mw.Train("1Mi", "4k"), given="fsdp=16")
    >>> plans.best.layout.fsdp, plans[0].layout == plans.best.layout
    (16, True)
    """

    model: ModelConfig
    hardware: Hardware
    work: Train
    search: Search
    top: int = 10
    sizing: Smallest | None = None
    opinions: tuple["Opinion", ...] = ()

    @property
    def best(self) -> PricedLayout:
        """The fastest layout that fits, or the nearest to fitting if none does."""
        return PricedLayout(self.model, self.hardware, self.work, self.search)

    def __len__(self) -> int:
        return len(self.search.candidates)

    def __getitem__(self, place: int) -> PricedLayout:
        if place == 0:
            return self.best
        of_one = Search((self.search.candidates[place],), 1, 0.0, self.model, self.workload)
        return PricedLayout(self.model, self.hardware, self.work, of_one)

    def __iter__(self) -> Iterator[PricedLayout]:
        return (self[place] for place in range(len(self)))

    def explain(
        self, *, tokens: int | str | None = None, critical_batch: int | str | None = None
    ) -> Explanation:
        """The best layout in words, and its alternatives; see `PricedLayout.explain`."""
        return self.best.explain(tokens=tokens, critical_batch=critical_batch)

    def audited(self, progress: Progress | None = None) -> "Plans":
        """These layouts, with the best ranked again by the compiler's memory and schedule.

        Raises AuditError if the compiler of the hardware's chips is not installed.
        """
        from meshwright.audit.second_opinion import second_opinion

        say = progress or _silent
        search, opinions = second_opinion(
            self.model, self.hardware, self.search, progress=lambda what: say(what, None)
        )
        return replace(self, search=search, opinions=opinions)

    def to_dict(self) -> dict:
        """The keys of `mw plan train --json`."""
        return self.document(self.explain())

    def save(self, path: str | Path) -> Path:
        """Write the best as plan.toml, and its figures as .json next to it; see `PricedLayout.save`."""
        write_plan(Path(path), self.best.plan, self.to_dict())
        return Path(path)

    @property
    def workload(self) -> Workload:
        """The batch that is planned: of whole sequences, the nearest to `work` that divides."""
        return self.search.workload

    def document(self, explanation: Explanation | None) -> dict:
        """The keys of `to_dict`, with the given explanation or without one."""
        return plan_document(
            self.model,
            self.hardware,
            self.work.batch_tokens,
            self.search,
            self.top,
            explanation,
            self.sizing,
            self.opinions,
            self.best.launch,
        )

    def __repr__(self) -> str:
        from meshwright.report.terminal.tables import plain_text, plan_table

        document, search = self.document(None), self.search
        below = [search.faster_words] if search.faster_words else []
        return plain_text(*search.notices, heading(document, self.best.layout), plan_table(document), *below)


def _silent(what: str, fraction: float | None) -> None:
    """Show no progress."""
