"""Times several programs on a machine that other work may share."""

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
    """Median seconds of one run, and its spread: the interquartile range over the median."""

    seconds: float
    spread: float

    def per(self, repeats: int) -> "Timing":
        """The timing of one of `repeats` equal parts of the program."""
        return Timing(self.seconds / repeats, self.spread)


@dataclass(frozen=True)
class Prepared(Generic[Measured]):
    """Compiled programs, and what their timings make: `finish` takes one Timing a program."""

    programs: list[TimedCall]
    finish: Callable[[list[Timing]], list[Measured]]


def run_prepared(prepared: Prepared[Measured], rounds: int = ROUNDS) -> list[Measured]:
    """What was prepared, measured."""
    return prepared.finish(time_interleaved(prepared.programs, rounds))


def run_together(prepared: Sequence[Prepared[Any]], rounds: int = ROUNDS) -> list[list[Any]]:
    """Several preparations measured in the same rounds: a busy machine slows all their figures alike."""
    timings = iter(time_interleaved([program for one in prepared for program in one.programs], rounds))
    return [one.finish(list(islice(timings, len(one.programs)))) for one in prepared]


def time_interleaved(programs: Sequence[TimedCall], rounds: int) -> list[Timing]:
    """The Timing of each program; a call returns when its work is done.

    Each runs once to warm up, then once in each of `rounds` rounds, so that a busy moment of the
    machine falls on all programs rather than on one.
    """
    for program in programs:
        program()
    return _rounds(programs, rounds)


def run_within(
    prepared: Prepared[Measured], seconds: float, agreed: Callable[[float], float] = float
) -> tuple[list[Measured], float]:
    """What was prepared, in as many rounds as fit into `seconds`, up to 7; and the seconds of one round.

    agreed: makes one number of those that several processes give, which must run as many rounds.
    """
    warm_up = _seconds(lambda: [program() for program in prepared.programs])
    one_round = agreed(warm_up)
    rounds = max(1, min(_MOST_ROUNDS, int(seconds / one_round)))
    return prepared.finish(_rounds(prepared.programs, rounds)), one_round


def _rounds(programs: Sequence[TimedCall], rounds: int) -> list[Timing]:
    """Rounds in an order of their own each, so that no program always follows one that fills the caches."""
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
    """Tells the caller, if it listens, what is being measured."""
    if progress:
        progress(message)
