"""metrics.jsonl: one JSON object a logged step, and the reporter that fetches, times and writes them."""

import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax

from meshwright.errors import OutputError
from meshwright.files import write_whole

Line = dict[str, Any]
_MAKE_ROOM = "make room, then go on from the last checkpoint with --resume"


def read_lines(path: Path) -> list[Line]:
    """The lines of a metrics.jsonl in order; a last one without its line end is left out.

    Another line that is not a JSON object with a step is left out too, with a warning that names it.
    """
    if not path.is_file():
        return []
    *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines: list[Line] = []
    for number, text in enumerate(whole, start=1):
        line = _parsed(text)
        if line is None:
            warnings.warn(f"{path} line {number}: is not a line of metrics; it is skipped", stacklevel=2)
        else:
            lines.append(line)
    return lines


def _parsed(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def truncate(path: Path, step: int) -> None:
    """Drops the lines past `step`, which a run resumed from there writes again."""
    kept = [line for line in read_lines(path) if line["step"] <= step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))


def append(path: Path, line: Line) -> None:
    """Adds one line with a single write to the end of the file, so no reader sees half of it.

    Raises OutputError where it cannot be written, such as on a full disk.
    """
    text = (json.dumps(line) + "\n").encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(descriptor, text)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}; {_MAKE_ROOM}") from error
    if written < len(text):
        raise OutputError(f"{path}: cannot be written: No space left on device; {_MAKE_ROOM}")


class Reporter:
    """Reports each step once the next is dispatched, so that fetching its numbers stalls no device.

    path: the metrics.jsonl. num_tokens, flops: of one step. peak_flops_per_second: of the whole
    machine. check: raises for numbers that no state may be kept of; it is asked before they are written.
    A step's wall time is that between its numbers' arrival and those of the step before;
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
        check: Callable[[Line], None],
    ) -> None:
        self.line: Line = {}
        self._more: Line = {}
        self._path, self._log_every, self._on_step, self._check = path, log_every, on_step, check
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
        """Fetches the numbers of the step pushed last into `line`, once they are checked."""
        assert self._pending is not None, "wait follows push"
        step, metrics = self._pending
        self._pending = None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self._tick()
        self._check({"step": step, **values})
        self.line = {"step": step, **values, **self._speed(), **self._more}

    def report(self, *, always: bool = False, found: Line | None = None) -> None:
        """Hands `line`, with what was `found` besides, to on_step; writes it where due or `always`."""
        self.line |= found or {}
        if always or self.line["step"] % self._log_every == 0:
            if jax.process_index() == 0:
                append(self._path, self.line)
            self._window.clear()
        if self._on_step is not None:
            self._on_step(self.line)

    def restart_clock(self) -> None:
        """Leaves what was done since the last step out of the next one's time."""
        self._arrived = time.perf_counter()

    def begin(self, more: Line) -> None:
        """Begins anew, without the step under way; every line from here on holds `more` too."""
        self._more, self._pending = more, None
        self._arrived = None
        self._window.clear()

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
