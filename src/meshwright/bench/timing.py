"""Timing of several programs on a machine that may be shared."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

Listener = Callable[[str], None] | None
TimedCall = Callable[[], object]
Measured = TypeVar("Measured")

ROUNDS = 4
_MOST_ROUNDS = 7


@dataclass(frozen=True)
class Timing:
    """Median seconds of a run, and their spread: the interquartile range over the median."""

    seconds: float
    spread: float

    def per(self, repeats: int) -> "Timing":
        """The timing of a part, if the program has `repeats` equal parts."""
        return Timing(self.seconds / repeats, self.spread)


@dataclass(frozen=True)
class Prepared(Generic[Measured]):
    """Compiled programs. `finish` makes measurements from the timings, one for each program in order."""

    programs: list[TimedCall]
    finish: Callable[[list[Timing]], list[Measured]]


def run_prepared(prepared: Prepared[Measured], rounds: int = ROUNDS) -> list[Measured]:
    """Measurements of the prepared programs."""
    return prepared.finish(time_interleaved(prepared.programs, rounds))


def run_together(prepared: Sequence[Prepared[Any]], rounds: int = ROUNDS) -> list[list[Any]]:
    """Measurements in the same rounds, so that a busy machine slows all figures equally."""
    timings = iter(time_interleaved([program for p in prepared for program in p.programs], rounds))
    return [p.finish(list(islice(timings, len(p.programs)))) for p in prepared]


def time_interleaved(programs: Sequence[TimedCall], rounds: int) -> list[Timing]:
    """The Timing of each program. A call of a program must return only after its work is done.

    Each runs once to warm up, then once in each of `rounds` rounds, so that a busy moment of the
    machine slows all programs and not only one.
    """
    for program in programs:
        program()
    return _rounds(programs, rounds)


def run_within(
    prepared: Prepared[Measured], seconds: float, agreed: Callable[[float], float] = float
) -> tuple[list[Measured], float]:
    """Measurements in at most _MOST_ROUNDS rounds that fit `seconds`, and the seconds of a round.

    agreed: returns the same number in all processes, which must run the same number of rounds.
    """
    warm_up = _seconds(lambda: [program() for program in prepared.programs])
    round_seconds = agreed(warm_up)
    rounds = max(1, min(_MOST_ROUNDS, int(seconds / round_seconds)))
    return prepared.finish(_rounds(prepared.programs, rounds)), round_seconds


def _rounds(programs: Sequence[TimedCall], rounds: int) -> list[Timing]:
    # The order is random, so that no program always follows one that fills the caches.
    order = np.random.default_rng(0)
    seconds = np.empty((len(programs), rounds))
    for one_round in range(rounds):
        for index in order.permutation(len(programs)):
            seconds[index, one_round] = _seconds(programs[index])
    return [_timing(row) for row in seconds]


def _seconds(program: TimedCall) -> float:
    start = time.perf_counter()
    program()
    return time.perf_counter() - start


def _timing(seconds: np.ndarray) -> Timing:
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return Timing(float(median), float((high - low) / median))


def tell(progress: Listener, message: str) -> None:
    """Pass a message on progress to the listener, if there is one."""
    if progress:
        progress(message)
