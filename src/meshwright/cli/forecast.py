"""Predicted seconds and bytes of a server's steps."""

from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.load.padded import PaddedSteps
from meshwright.models.config import ModelConfig
from meshwright.plan.serve.steps import StepBytes
from meshwright.plan_file import Plan
from meshwright.serve.engine.batch import Batch
from meshwright.serve.engine.limits import Limits


class StepForecast:
    """Seconds and bytes of any step, with padding as in the server's programs.

    layout: the layout of the server. plan: gives the layout and machine for seconds; None for no seconds.
    """

    def __init__(
        self, config: ModelConfig, layout: Layout, limits: Limits, num_drafts: int, plan: Plan | None
    ) -> None:
        self._bytes, self._seconds = StepBytes(config, layout), None
        if plan is not None:
            hardware = catalog.load(plan.hardware)
            self._seconds = PaddedSteps.of(config, plan.layout, hardware, limits, num_drafts)

    def seconds(self, batch: Batch) -> float | None:
        """Seconds of a step; None without a plan."""
        return None if self._seconds is None else self._seconds.seconds(*batch.figures)

    def bytes(self, batch: Batch) -> dict[str, int]:
        """Bytes of weights and of the cache that a chip reads, as a mean over the chips."""
        ends = (work.start + len(work.tokens) for work in batch.works)
        return {"weights": self._bytes.weights, "cache": round(sum(map(self._bytes.cache, ends)))}
