"""Results of the library for serving."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from meshwright.api.document import check_output, versions
from meshwright.api.inputs import Serve
from meshwright.engines.serving_engine import ENGINES, ServingEngine
from meshwright.files import write_whole
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.plan.serve.explain import ServeExplanation, explain_serving
from meshwright.plan.serve.point import Point
from meshwright.plan.serve.ranges import serving_ranges
from meshwright.plan.serve.search import ServePlan
from meshwright.plan.serve.serving_plan import plan_of_point
from meshwright.plan.serve.serving_verdict import serving_verdict
from meshwright.plan_file import Plan, save_plan
from meshwright.progress import Progress


@dataclass(frozen=True, repr=False)
class ServedLayout:
    """One way to serve `model`: machine, layout and batch.

    >>> import meshwright as mw
    >>> best = mw.plan("llama-3-8b", "v5e:2x2", mw.Serve("1k", 128, tpot=0.03)).best
    >>> best.layout.mesh.num_devices, best.fits, best.tpot_seconds < 0.03
    (4, True, True)
    """

    model: ModelConfig
    point: Point

    @property
    def hardware(self) -> Hardware:
        return self.point.hardware

    @property
    def layout(self) -> Layout:
        """The splits of all arrays."""
        return self.point.layout

    @property
    def batch(self) -> int:
        """Sequences of a generate step."""
        return self.point.batch

    @property
    def step_seconds(self) -> float:
        """Seconds of a generate step."""
        return self.point.cost.seconds

    @property
    def tpot_seconds(self) -> float:
        """Seconds per further token of a request."""
        return self.point.tpot_seconds

    @property
    def ttft_seconds(self) -> float:
        """Seconds until the first token, on idle chips."""
        return self.point.ttft_seconds

    @property
    def tokens_per_second_per_chip(self) -> float:
        """New tokens a second of a chip, while it generates."""
        return self.point.tokens_per_second_per_chip

    @property
    def mfu(self) -> float:
        """Model FLOPs of a generate step over the chips' dense peak."""
        return self.point.mfu

    @property
    def fits(self) -> bool:
        """Whether the layout fits the memory of a chip, as all ranked layouts do."""
        return self.point.memory.total <= self.hardware.chip.program_bytes

    @property
    def plan(self) -> Plan:
        """The plan to save, serve and audit. Raises LayoutError if the layout needs padding."""
        return plan_of_point(self.point)

    def __repr__(self) -> str:
        return f"ServedLayout({self.point})"

    def explain(self) -> ServeExplanation:
        """An explanation in words: the limit of a step, the batch at which it changes, and int8's effect."""
        return explain_serving(self.point)

    def to_dict(self) -> dict:
        """The keys of a point of `mw plan serve --json`."""
        return self.point.to_dict()

    def audit(
        self, target: str | None = None, *, numerics: bool = True, progress: Progress | None = None
    ) -> dict:
        """A comparison of the compiled generate step with the plan, as `mw audit --json`.

        The key `prefill` has the same for a prefill step. target, numerics: as in `PricedLayout.audit`.
        """
        from meshwright.audit.plan_audit import audit_phases

        say = progress or (lambda *_: None)
        return audit_phases(self.plan, target, lambda what: say(what, None), numerics=numerics)

    def save(self, path: str | Path) -> Path:
        """Write plan.toml for `mw serve` and `mw audit`, and its figures as .json next to it."""
        return write_serve_plan(Path(path), self.plan, self.to_dict())


@dataclass(frozen=True, repr=False)
class ServedLayouts:
    """The frontier of a search, by time per token; `best` meets the targets. Its repr is the table."""

    model: ModelConfig
    work: Serve
    searched: ServePlan

    @property
    def best(self) -> ServedLayout:
        """The point with most tokens a second per chip, or the cheapest if all chips have prices."""
        return ServedLayout(self.model, self.searched.best)

    def __len__(self) -> int:
        return len(self.searched.frontier)

    def __getitem__(self, place: int) -> ServedLayout:
        return ServedLayout(self.model, self.searched.frontier[place])

    def __iter__(self) -> Iterator[ServedLayout]:
        return (self[place] for place in range(len(self)))

    def explain(self) -> ServeExplanation:
        """The best point in words."""
        return self.best.explain()

    @cached_property
    def _document(self) -> dict:
        return serve_document(self.model, self.work, self.searched)

    def to_dict(self) -> dict:
        """The keys of `mw plan serve --json`."""
        return self._document

    def __repr__(self) -> str:
        from meshwright.report.terminal.frontier_table import frontier_table
        from meshwright.report.terminal.tables import plain_text

        return plain_text(frontier_table(self._document))


def serve_document(
    config: ModelConfig, work: Serve, searched: ServePlan, engine: ServingEngine | None = None
) -> dict:
    """The keys of `mw plan serve` in docs/reference/json.md, then each chip's frontier and the inputs."""
    best = searched.best
    ranges = serving_ranges(
        config,
        best.hardware,
        engine or ENGINES["meshwright"],
        ttft_seconds=best.ttft_seconds,
        tpot_seconds=best.tpot_seconds,
        tokens_per_second=best.tokens_per_second,
    )
    return {
        "verdict": serving_verdict(config, work.requests, work.targets, searched),
        "frontier": [point.to_dict() for point in searched.frontier],
        "best": best.to_dict(),
        "ranges": ranges,
        "other_prefills": [way.to_dict() for way in best.other_prefills],
        "prefill_to_generate_ratio": best.prefill_to_generate_ratio,
        "max_batch": best.max_batch,
        "by_chip": {kind: [point.to_dict() for point in points] for kind, points in searched.by_chip.items()},
        "smallest": [asdict(size) for size in searched.smallest],
        "search": {"considered": searched.considered, "seconds": searched.seconds},
        "model": {"name": config.name, "params": count_params(config).total},
        "requests": asdict(work.requests),
        "targets": {"ttft_seconds": work.ttft, "tpot_seconds": work.tpot},
        "environment": versions(),
    }


def write_serve_plan(path: Path, plan: Plan, document: dict) -> Path:
    """Write plan.toml atomically, and its figures as .json next to it; returns `path`."""
    check_output(path)
    save_plan(plan, path)
    write_whole(path.with_suffix(".json"), json.dumps(document, indent=1))
    return path
