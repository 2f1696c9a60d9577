"""Times several programs on a machine that other work may share."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Progress = Callable[[str], None] | None
Program = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Median seconds of one run, and its spread: the interquartile range over the median."""

    seconds: float
    spread: float

    def per(self, repeats: int) -> "Timing":
        """The timing of one of `repeats` equal parts of the program."""
        return Timing(self.seconds / repeats, self.spread)


def time_interleaved(programs: Sequence[Program], rounds: int) -> list[Timing]:
    """The Timing of each program; a call returns when its work is done.

    Each runs once to warm up, then in `rounds` rounds one after the other, so that a busy moment of
    the machine falls on all programs rather than on one.
    """
    for program in programs:
        program()
    seconds = [[_seconds(program) for program in programs] for _ in range(rounds)]
    return [_timing(np.asarray(column)) for column in zip(*seconds, strict=True)]


def _seconds(program: Program) -> float:
    start = time.perf_counter()
    program()
    return time.perf_counter() - start


def _timing(seconds: np.ndarray) -> Timing:
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return Timing(float(median), float((high - low) / median))


def report(progress: Progress, message: str) -> None:
    """Tells the caller, if it listens, what is being measured."""
    if progress:
        progress(message)
