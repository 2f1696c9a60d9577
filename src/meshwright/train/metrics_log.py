"""metrics.jsonl, with a JSON object for each logged step, and the reporter that writes it."""

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
    """The lines of a metrics.jsonl in order, without a last line that is incomplete.

    A line that is not a JSON object with a step is also left out, with a warning that names it.
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
    """Drop the lines after `step`, which a run resumed from there writes again."""
    kept = [line for line in read_lines(path) if line["step"] <= step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))


def append(path: Path, line: Line) -> None:
    """Append a line with a single write, so that no reader sees a part of it.

    Raises OutputError if it cannot be written, for example on a full disk.
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
    """A reporter of each step after the next is dispatched, so that fetching numbers stalls no device.

    path: the metrics.jsonl. num_tokens, flops: of one step. peak_flops_per_second: of the whole
    machine. check: called before numbers are written; raises for numbers whose state must not be kept.
    The wall time of a step is the time between the arrival of its numbers and of the previous numbers. The
    first step of a process has no wall time, so compilation is not included.
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
        """Take the pending numbers of a dispatched step, and report the previous step."""
        if self._pending is not None:
            self.wait()
            self.report()
        self._pending = (step, metrics)

    def wait(self) -> None:
        """Fetch and check the numbers of the last pushed step, and put them into `line`."""
        assert self._pending is not None, "wait follows push"
        step, metrics = self._pending
        self._pending = None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self._tick(values.pop("step_seconds", None))
        self._check({"step": step, **values})
        self.line = {"step": step, **values, **self._speed(), **self._more}

    def report(self, *, always: bool = False, line: Line | None = None) -> None:
        """Pass `line`, with the numbers `found` added, to on_step; write it if due or if `always`."""
        self.line |= line or {}
        if always or self.line["step"] % self._log_every == 0:
            if jax.process_index() == 0:
                append(self._path, self.line)
            self._window.clear()
        if self._on_step is not None:
            self._on_step(self.line)

    def restart_clock(self) -> None:
        """Exclude the time since the last step from the wall time of the next step."""
        self._arrived = time.perf_counter()

    def begin(self, more: Line) -> None:
        """Restart without the pending step; all lines after this include `more`."""
        self._more, self._pending = more, None
        self._arrived = None
        self._window.clear()

    def _tick(self, measured: float | None) -> None:
        """Note the seconds of a step: as measured by a step that waits for its devices, or since the last."""
        now = time.perf_counter()
        if self._arrived is not None:
            self._window.append(now - self._arrived if measured is None else measured)
        self._arrived = now

    def _speed(self) -> Line:
        seconds = median(self._window) if self._window else None
        return {
            "step_seconds": seconds,
            "planned_step_seconds": self._planned_step_seconds,
            "tokens_per_second": seconds and self._num_tokens / seconds,
            "mfu": seconds and self._flops / (seconds * self._peak),
        }
