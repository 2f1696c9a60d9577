"""The layouts of a search that fit, the fastest first. Few of them are priced in full.

A layout's time has lower bounds. Each step below costs more than the one before it and gives a closer bound:

    members      meshes of one family and number of stages: their passes without ZeRO (cost/many.py)
    recorded     the same meshes: their family's own passes, with ZeRO
    scheduled    members under one schedule and remat policy: the bound of cost/pipeline/bound.py
    choice       a single layout that fits
    timed        its simulated step

One heap holds all entries by their bounds. The entry with the least bound goes to its next step. If it is a
timed layout, no other layout is faster.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from meshwright.cost.many import Member, Saving
from meshwright.plan.space import Considered, StageGroup
from meshwright.units import Numeric

# Entries with bounds up to this factor above the least go to the next step together, since arrays are priced
# at once.
_TOGETHER = 1.2
# The condition that layouts must meet; None for all layouts.
_Wanted = Callable[[Considered], bool] | None


class _Members(NamedTuple):
    """Members of a group, with all of its schedules.

    places, bounds: the least bound first. is_recorded: the bounds are of their family's own passes, not of
    `Unsharded`.
    """

    wanted: _Wanted
    group: StageGroup
    places: Any
    bounds: Any
    is_recorded: bool


class _Scheduled(NamedTuple):
    """Members of a group under one schedule and remat policy."""

    wanted: _Wanted
    group: StageGroup
    places: Any
    bounds: Any
    schedule: tuple[str, int]
    saving: Saving


class _Single(NamedTuple):
    """A layout that fits. is_timed: its bound is its time."""

    choice: Considered
    is_timed: bool


class Fastest:
    """An iterable of (seconds, layout), the fastest that fits first.

    asked: the number of sequences that the seconds are for. A larger step counts as one step, a smaller step
    as several. wanted: the condition that layouts must meet. members: the condition that meshes and their
    batches must meet, checked before any layout of them is priced. lacking: layouts found so far that do
    not fit.
    """

    def __init__(
        self,
        groups: Iterable[StageGroup],
        *,
        asked: int | None = None,
        wanted: _Wanted = None,
        members: Callable[[Member], bool] | None = None,
    ) -> None:
        self._asked, self._wanted, self._members = asked, wanted, members
        self._serial = count()
        self._heap: list[tuple[float, int, _Members | _Scheduled | _Single]] = []
        self._ready: list[tuple[float, Considered]] = []
        # Members whose weights, gradients and optimizer state exceed a chip: tried only if no layout fits.
        self._too_large: list[tuple[_Members, tuple[str, int], list[int]]] = []
        self.lacking: list[Considered] = []
        self.add(groups)

    def add(self, groups: Iterable[StageGroup]) -> None:
        """Add layouts, before any slower layout has been yielded."""
        for group in groups:
            places = group.all_places
            if self._members is not None:
                kept = [place for place in places.tolist() if self._members(group.member(place))]
                places = np.array(kept, dtype=int)
            ascending = self._ascending(group, places, group.unsharded_seconds[places])
            self._push(_Members(self._wanted, group, *ascending, is_recorded=False))

    def __bool__(self) -> bool:
        """Whether there is any layout, fitting or not."""
        while not (self._ready or self.lacking) and self._has_more():
            self._advance()
        return bool(self._ready or self.lacking)

    def __iter__(self) -> Iterator[tuple[float, Considered]]:
        for place in count():
            while place >= len(self._ready) and self._has_more():
                self._advance()
            if place >= len(self._ready):
                return
            yield self._ready[place]

    def seconds(self, choice: Considered) -> float:
        """Simulated seconds of a layout's step."""
        return choice.seconds * self._weights(choice.num_sequences)

    def within(self, seconds: float) -> Iterator[Considered]:
        """The layouts that fit and whose bounds are not above `seconds`, unordered; some may take longer."""
        yield from [choice for taken, choice in self._ready if taken <= seconds]
        kept = []
        while self._heap and self._heap[0][0] <= seconds:
            bound, serial, item = heappop(self._heap)
            if isinstance(item, _Single):
                kept.append((bound, serial, item))
            else:
                self._split(bound, item)
        for entry in kept:
            heappush(self._heap, entry)
        yield from [one.choice for _, _, one in kept]

    def keep(self, wanted: Callable[[Considered], bool]) -> None:
        """Drop the layouts added so far that are not `wanted`."""
        self._ready = [(seconds, choice) for seconds, choice in self._ready if wanted(choice)]
        self.lacking = [choice for choice in self.lacking if wanted(choice)]
        waiting, self._heap = self._heap, []
        for bound, serial, entry in waiting:
            if not isinstance(entry, _Single):
                entry = entry._replace(wanted=_both(entry.wanted, wanted))
            elif not wanted(entry.choice):
                continue
            heappush(self._heap, (bound, serial, entry))
        self._too_large = [
            (members._replace(wanted=_both(members.wanted, wanted)), schedule, places)
            for members, schedule, places in self._too_large
        ]

    def _has_more(self) -> bool:
        """Whether the heap has entries. If nothing fits, the members in `_too_large` are added first."""
        if not self._heap and not self._ready:
            too_large, self._too_large = self._too_large, []
            for members in too_large:
                self._first_schedules(*members)
        return bool(self._heap)

    def _advance(self) -> None:
        """Take the entry with the least bound to its next step."""
        bound, _, entry = heappop(self._heap)
        if not isinstance(entry, _Single):
            self._split(bound, entry)
        elif entry.is_timed:
            self._ready.append((bound, entry.choice))
        else:
            self._push_single(entry.choice, self.seconds(entry.choice), is_timed=True)

    def _split(self, bound: float, entry: _Members | _Scheduled) -> None:
        """Take members near the bound to the next step; the rest stay in the heap."""
        if isinstance(entry, _Members) and not entry.is_recorded:
            ascending = self._ascending(entry.group, entry.places, entry.group.least_seconds[entry.places])
            self._push(_Members(entry.wanted, entry.group, *ascending, is_recorded=True))
            return
        number = int(np.searchsorted(entry.bounds, bound * _TOGETHER, side="right"))
        now, later = (
            entry.places[:number],
            entry._replace(places=entry.places[number:], bounds=entry.bounds[number:]),
        )
        if isinstance(entry, _Members):
            chosen = set(now.tolist())
            for schedule, places in entry.group.schedules.items():
                if some := [place for place in places if place in chosen]:
                    holds = entry.group.holds_state(*schedule)
                    self._first_schedules(entry, schedule, [place for place in some if holds[place]])
                    if larger := [place for place in some if not holds[place]]:
                        self._too_large.append((entry, schedule, larger))
        else:
            self._fit(entry, now, entry.bounds[:number])
        self._push(later)

    def _first_schedules(self, entry: _Members, schedule: tuple[str, int], places: list[int]) -> None:
        """Add members under a schedule, with the remat policies that are tried first."""
        for saving in entry.group.space.first_savings(entry.group.pipe) if places else ():
            self._schedule(entry, schedule, saving, places)

    def _schedule(
        self, entry: _Members | _Scheduled, schedule: tuple[str, int], saving: Saving, places: list[int]
    ) -> None:
        """Add members under a schedule and a remat policy, with their bounds."""
        group = entry.group
        least = group.least_seconds_of(*schedule, saving, places)
        ascending = self._ascending(group, np.array(places), least)
        self._push(_Scheduled(entry.wanted, group, *ascending, schedule, saving))

    def _fit(self, entry: _Scheduled, places: Any, bounds: Any) -> None:
        """Keep the layouts that fit, and try the next policies for the others."""
        group, space, more = entry.group, entry.group.space, []
        choices = group.choices(*entry.schedule, entry.saving, places.tolist())
        for choice, bound in zip(choices, bounds.tolist(), strict=True):
            if space.tries_next(choice):
                more.append(choice.place)
            if entry.wanted and not entry.wanted(choice):
                continue
            if choice.lacking_bytes:
                self.lacking.append(choice)
            else:
                self._push_single(choice, bound, is_timed=False)
        for saving in space.next_savings(entry.saving, group.pipe) if more else ():
            self._schedule(entry, entry.schedule, saving, more)

    def _ascending(self, group: StageGroup, places: Any, seconds: Any) -> tuple[Any, Any]:
        """Places and bounds, the least bound first."""
        bounds = seconds * self._weights(group.num_sequences[places])
        order = np.argsort(bounds, kind="stable")
        return places[order], bounds[order]

    def _push(self, entry: _Members | _Scheduled) -> None:
        if len(entry.places):
            heappush(self._heap, (float(entry.bounds[0]), next(self._serial), entry))

    def _push_single(self, choice: Considered, bound: float, *, is_timed: bool) -> None:
        heappush(self._heap, (bound, next(self._serial), _Single(choice, is_timed)))

    def _weights(self, num_sequences: Numeric) -> Any:
        """Number of steps of `num_sequences` sequences that do the work of a step of `asked`, at least 1."""
        return np.maximum(1.0, self._asked / num_sequences) if self._asked else 1.0


def _both(first: _Wanted, second: Callable[[Considered], bool]) -> Callable[[Considered], bool]:
    return second if first is None else lambda choice: first(choice) and second(choice)
