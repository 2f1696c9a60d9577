"""Causes of a measured step time that differs from the planned time."""

import os
from dataclasses import dataclass

from meshwright.units import format_seconds

# Smaller relative differences are within the accuracy of a plan.
_FAR = 0.2
# A cause is named if it is more than this share of the measured time.
_MUCH = 0.05


@dataclass(frozen=True)
class Waits:
    """Possible causes of waiting in a run's steps, in seconds per step.

    input: the devices were idle, since the next batch was not ready. num_compiled: compiled programs of the
    step; one is expected. collectives: time in collectives by a profile; None without a profile. load: mean
    number of runnable processes on the machine, and its cores; None if unknown.
    """

    input: float = 0.0
    num_compiled: int = 1
    collectives: float | None = None
    load: tuple[float, int] | None = None


def machine_load() -> tuple[float, int] | None:
    """The mean number of runnable processes over the last minute, and the cores."""
    try:
        return os.getloadavg()[0], os.cpu_count() or 1
    except OSError:
        return None


def why_not_as_planned(
    measured: float, planned: float, waits: Waits, planned_collectives: float | None = None
) -> str | None:
    """A sentence on the causes if a step takes 20% more or less than planned, otherwise None.

    measured, planned: seconds of a step. planned_collectives: seconds that the planned step waits for
    collectives. The largest cause comes first; without a cause the sentence names the option that shows it.
    """
    ratio = measured / planned
    if 1 - _FAR <= ratio <= 1 + _FAR:
        return None
    says = f"a step takes {ratio:.2f} times the planned {format_seconds(planned)}"
    if ratio < 1:
        return f"{says}: the chip or its links are faster than the plan's figures; mw calibrate measures them"
    causes = _causes(measured, waits, planned_collectives)
    if not causes:
        return f"{says}; nothing held it up from outside: --profile 10:15 shows which operations take longer"
    return f"{says}: {'; '.join(causes)}"


def _causes(measured: float, waits: Waits, planned_collectives: float | None) -> list[str]:
    causes: list[tuple[float, str]] = []
    if waits.input > _MUCH * measured:
        causes.append((waits.input, f"input: {format_seconds(waits.input)} of it wait for the next batch"))
    if waits.collectives is not None and planned_collectives is not None:
        more = waits.collectives - planned_collectives
        if more > _MUCH * measured:
            text = f"collectives: {format_seconds(waits.collectives)} of it, "
            causes.append((more, text + f"{format_seconds(planned_collectives)} planned"))
    if waits.num_compiled > 1:
        causes.append((measured, f"compile: the step was compiled {waits.num_compiled} times"))
    if waits.load is not None and waits.load[0] > 1.5 * waits.load[1]:
        load, cores = waits.load
        causes.append((0.0, f"clock: {load:.0f} processes share {cores} cores"))
    return [text for _, text in sorted(causes, reverse=True)]
