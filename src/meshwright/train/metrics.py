"""metrics.jsonl: one JSON object a logged step, and the reporter that fetches, times and writes them."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.files import write_whole

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """The lines of a metrics.jsonl in order; a last one without its line end is left out."""
    if not path.is_file():
        return []
    *whole, _ = path.read_text().split("\n")
    return [json.loads(text) for text in whole]


def truncate(path: Path, step: int) -> None:
    """Drops the lines past `step`, which a run resumed from there writes again."""
    kept = [line for line in read_lines(path) if line["step"] <= step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))


def append(path: Path, line: Line) -> None:
    """Adds one line with a single write to the end of the file, so no reader sees half of it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(line) + "\n").encode())
    finally:
        os.close(descriptor)


class Reporter:
    """Reports each step once the next is dispatched, so that fetching its numbers stalls no device.

    path: the metrics.jsonl. num_tokens, flops: of one step. peak_flops_per_second: of the whole
    machine. A step's wall time is that between its numbers' arrival and those of the step before;
    the first of a process has none before it, which leaves compilation out.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_tokens: int,
        flops: float,
        peak_flops_per_second: float,
        planned_step_seconds: float | None,
        log_every: int,
        on_step: Callable[[Line], None] | None,
    ) -> None:
        self.line: Line = {}
        self._path, self._log_every, self._on_step = path, log_every, on_step
        self._num_tokens, self._flops, self._peak = num_tokens, flops, peak_flops_per_second
        self._planned_step_seconds = planned_step_seconds
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._arrived: float | None = None
        self._window: list[float] = []

    def push(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes a dispatched step's numbers, still on their way, and reports the step before."""
        if self._pending is not None:
            self.wait()
            self.report()
        self._pending = (step, metrics)

    def wait(self) -> None:
        """Fetches the numbers of the step pushed last into `line`; MeshwrightError if not finite."""
        assert self._pending is not None, "wait follows push"
        step, metrics = self._pending
        self._pending = None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self._tick()
        for name in ("loss", "grad_norm"):
            if not math.isfinite(values[name]):
                raise MeshwrightError(
                    f"training diverged: {name} is {values[name]} at step {step};"
                    " go on from the last checkpoint, or start again, with a lower learning rate"
                )
        self.line = {"step": step, **values, **self._speed()}

    def report(self, *, always: bool = False, validation_loss: float | None = None) -> None:
        """Hands `line` to on_step, and writes it where its step is due or `always`."""
        if validation_loss is not None:
            self.line["validation_loss"] = validation_loss
        if always or self.line["step"] % self._log_every == 0:
            if jax.process_index() == 0:
                append(self._path, self.line)
            self._window.clear()
        if self._on_step is not None:
            self._on_step(self.line)

    def restart_clock(self) -> None:
        """Leaves what was done since the last step out of the next one's time."""
        self._arrived = time.perf_counter()

    def _tick(self) -> None:
        now = time.perf_counter()
        if self._arrived is not None:
            self._window.append(now - self._arrived)
        self._arrived = now

    def _speed(self) -> Line:
        seconds = median(self._window) if self._window else None
        return {
            "step_seconds": seconds,
            "planned_step_seconds": self._planned_step_seconds,
            "tokens_per_second": seconds and self._num_tokens / seconds,
            "mfu": seconds and self._flops / (seconds * self._peak),
        }
