"""Pipeline schedules: published bubbles and memories, every dependency, and the closed form of a search."""

import time
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.pipeline import PassSeconds, Timeline, Times, in_flight, makespan, simulate
from meshwright.errors import LayoutError
from meshwright.layout.pipeline import SCHEDULES, Schedule, schedule
from meshwright.layout.pipeline.schedule import Pass

UNIT = Times(PassSeconds(1, 1, 1))
MANY = [(2, 4), (4, 8), (4, 20), (8, 16), (8, 64)]

Numbers = tuple[str, int, int, int]


@st.composite
def numbers(draw: st.DrawFn, max_stages: int = 8, max_microbatches: int = 24) -> Numbers:
    """A schedule that exists: its name, p, m and v."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    p = draw(st.integers(1, max_stages))
    m = draw(st.integers(1, max_microbatches))
    if name == "interleaved":
        p = max(p, 2)
        return name, p, p * draw(st.integers(1, 3)), draw(st.integers(2, 4))
    if name == "zb-v":
        p = max(p, 2)
        return name, p, max(p, m), 1
    if name == "dualpipe":
        p += p % 2
        return name, p, max(2 * p, m + m % 2), 1
    return name, p, m, 1


def seconds(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_subnormal=False)


@st.composite
def any_passes(draw: st.DrawFn) -> PassSeconds:
    return PassSeconds(draw(seconds(0.1, 4)), draw(seconds(0.1, 4)), draw(seconds(0, 4)))


@st.composite
def usual_times(draw: st.DrawFn) -> Times:
    """weight <= forward <= backward, as the closed form wants."""
    weight, forward = sorted((draw(seconds(0, 1)), draw(seconds(0.1, 1))))
    body = PassSeconds(forward, forward * draw(seconds(1, 4)), weight)
    return Times(body, hop_seconds=forward * draw(seconds(0, 1)))


@st.composite
def any_times(draw: st.DrawFn, num_depths: int) -> Times:
    """Other seconds at every depth."""
    special = {depth: draw(any_passes()) for depth in range(num_depths)}
    return Times(special[0], special, draw(seconds(0, 1)), draw(st.booleans()))


def run(name: str, p: int, m: int, v: int = 1, times: Times = UNIT) -> Timeline:
    return simulate(schedule(name, p, m, v), times)


# The published bubbles and memories.


@pytest.mark.parametrize(("p", "m"), [*MANY, (8, 3)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name: str, p: int, m: int):
    assert run(name, p, m).bubble_share == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), MANY)
@pytest.mark.parametrize("v", [2, 3, 6])
def test_bubble_of_interleaved(p: int, m: int, v: int):
    assert run("interleaved", p, m, v).bubble_share == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), MANY)
def test_memory(p: int, m: int):
    assert run("gpipe", p, m).peak_in_flight == (m,) * p
    assert run("1f1b", p, m).peak_in_flight == tuple(p - s for s in range(p))
    assert run("zb-h1", p, m).peak_in_flight == (p,) * p
    assert run("zb-v", p, m).peak_in_flight == (2 * p,) * p  # of half a stage's layers: 1F1B's memory
    assert run("dualpipe", p, m).peak_in_flight == (p + 1,) * p


def test_when_the_peak_is_reached():
    assert run("gpipe", 2, 3).peak_at_seconds == (3, 4)
    assert run("1f1b", 2, 3).peak_at_seconds == (2, 2)


@pytest.mark.parametrize(("p", "m"), MANY)
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b(p: int, m: int):
    busy = 3 * m
    assert run("1f1b", p, m).makespan_seconds - busy == 3 * (p - 1)
    assert run("zb-h1", p, m).makespan_seconds - busy == p - 1


@pytest.mark.parametrize(("p", "m"), [*MANY, (16, 16), (12, 40)])
def test_zb_v_idles_only_before_its_first_pass_and_after_its_last(p: int, m: int):
    timeline = run("zb-v", p, m)
    # The last stage waits p - 1 passes of half a stage for its first microbatch: that is all.
    assert timeline.makespan_seconds == 6 * m + p - 1
    last = [event for event in timeline.events if event.stage == p - 1]
    assert all(one.end == next_.start for one, next_ in pairwise(last))


@pytest.mark.parametrize(("p", "m"), MANY)
@pytest.mark.parametrize(("forward", "backward", "weight"), [(1, 1, 1), (2, 2, 1), (2, 2, 2)])
def test_bubble_of_dualpipe(p: int, m: int, forward: float, backward: float, weight: float):
    timeline = run("dualpipe", p, m, times=Times(PassSeconds(forward, backward, weight)))
    whole = backward + weight
    bubble = (p / 2 - 1) * ((forward + whole) + whole - 3 * weight)
    assert timeline.makespan_seconds - m * (forward + whole) == bubble
    assert timeline.schedule.weight_copies == 2


def test_a_row_of_interleaved():
    """The first device of figure 4 of SC21 (p = 4, v = 2): ten forward passes, then one and one."""
    row = schedule("interleaved", 4, 8, 2).rows[0]
    assert [(one.kind, one.microbatch, one.chunk) for one in row[:14]] == [
        *(("F", i, 0) for i in range(4)),
        *(("F", i, 1) for i in range(4)),
        *(("F", 4, 0), ("F", 5, 0)),
        *(("F", 6, 0), ("B", 0, 1), ("F", 7, 0), ("B", 1, 1)),
    ]


def test_a_row_of_zb_h1():
    """The last of three stages leaves two W for later; the first leaves none."""
    first, _, last = schedule("zb-h1", 3, 4).rows
    assert [one.kind for one in last] == list("FBFBFBWFBWWW")
    assert [one.kind for one in first] == list("FFFBWFBWBWBW")


def test_a_hidden_hop_delays_and_another_holds_the_stage():
    hidden = Times(UNIT.body, hop_seconds=0.5)
    exposed = Times(UNIT.body, hop_seconds=0.5, hops_hidden=False)
    # 4 F on the first stage, a hop, F; 4 B (of 2) on the second, a hop, B.
    assert run("gpipe", 2, 4, times=hidden).makespan_seconds == 5 + 0.5 + 10 + 0.5
    # Now every F of the first stage and every B of the second is followed by a hop.
    assert run("gpipe", 2, 4, times=exposed).makespan_seconds == 5 + 4 * 0.5 + 10 + 4 * 0.5


def test_the_turn_of_the_v_is_no_hop():
    hop = 100.0
    timeline = run("zb-v", 2, 2, times=Times(UNIT.body, hop_seconds=hop))
    turn = [e for e in timeline.events if e.stage == 1 and e.kind == "F" and e.microbatch == 0]
    assert turn[0].end == turn[1].start


# Every schedule.


@given(numbers())
def test_every_pass_runs_once(given_numbers: Numbers):
    table = schedule(*given_numbers)
    num_directions = len(table.routes)
    for row, split in zip(table.rows, table.split, strict=True):
        passes = [(one.kind, one.microbatch, one.chunk) for one in row]
        for kind in "FB":
            found = sorted((i, c) for k, i, c in passes if k == kind)
            chunks = range(table.num_chunks)
            half = table.num_microbatches // num_directions
            if num_directions == 1:
                wanted = [(i, c) for i in range(table.num_microbatches) for c in chunks]
            else:  # the second half of the microbatches is the other direction's
                wanted = [(i, i // half) for i in range(table.num_microbatches)]
            assert found == wanted
        assert sorted((i, c) for k, i, c in passes if k == "W") == sorted(split)


@given(numbers(max_stages=5, max_microbatches=10), st.data())
def test_dependencies_and_bounds(given_numbers: Numbers, data: st.DataObject):
    table = schedule(*given_numbers)
    times = data.draw(any_times(table.num_depths))
    timeline = simulate(table, times)
    at = {(e.kind, e.microbatch, table.depths[e.stage, e.chunk]): e for e in timeline.events}
    last = table.num_depths - 1
    for (kind, microbatch, depth), event in at.items():
        before = {
            "F": ("F", microbatch, depth - 1) if depth else None,
            "B": ("F", microbatch, depth) if depth == last else ("B", microbatch, depth + 1),
            "W": ("B", microbatch, depth),
        }[kind]
        if before is not None:
            hop = times.hop_seconds if at[before].stage != event.stage else 0
            assert at[before].end + hop <= event.start + 1e-9
    _one_pass_at_a_time(table, timeline)
    assert timeline.makespan_seconds >= max(timeline.busy_seconds) - 1e-9
    by_depth = times.at(table.num_depths)
    chain = sum(one.forward + one.backward for one in by_depth)
    num_hops = sum(one.stage != two.stage for one, two in pairwise(table.routes[0]))
    assert timeline.makespan_seconds >= chain + 2 * num_hops * times.hop_seconds - 1e-9
    assert sum(timeline.busy_seconds) == pytest.approx(
        table.num_microbatches * sum(one.total for one in by_depth)
    )


def _one_pass_at_a_time(table: Schedule, timeline: Timeline) -> None:
    joined = {(s, one.kind, one.microbatch) for s, row in enumerate(table.rows) for one in row if one.joined}
    for stage in range(table.num_stages):
        events = [e for e in timeline.events if e.stage == stage]
        for one, two in pairwise(events):
            together = {(stage, e.kind, e.microbatch) for e in (one, two)} & joined
            if together and one.start == two.start:
                assert one.end == two.end and {one.kind, two.kind} == {"F", "B"}
            else:
                assert one.end <= two.start + 1e-9


@given(numbers(max_stages=4, max_microbatches=6), st.data())
def test_simulation_equals_brute_force(given_numbers: Numbers, data: st.DataObject):
    table = schedule(*given_numbers)
    times = data.draw(any_times(table.num_depths))
    assert simulate(table, times).makespan_seconds == pytest.approx(_relaxed(table, times))


def _relaxed(table: Schedule, times: Times) -> float:
    """The makespan by relaxing every constraint until none moves a pass."""
    seconds_by_depth, last = times.at(table.num_depths), table.num_depths - 1
    start: dict[tuple[int, int], float] = {}
    groups = {s: _groups(row) for s, row in enumerate(table.rows)}
    place = {
        (one.kind, one.microbatch, table.depths[s, one.chunk]): (s, number)
        for s, found in groups.items()
        for number, group in enumerate(found)
        for one in group
    }

    def duration(s: int, group: list[Pass]) -> float:
        total = 0.0
        for one in group:
            body = seconds_by_depth[table.depths[s, one.chunk]]
            whole = one.kind == "B" and (one.microbatch, one.chunk) not in table.split[s]
            total += {"F": body.forward, "B": body.backward, "W": body.weight}[one.kind]
            total += body.weight if whole else 0.0
        return total

    def sends(s: int, one: Pass) -> bool:
        depth = table.depths[s, one.chunk]
        after = {"F": depth + 1, "B": depth - 1, "W": -1}[one.kind]
        if not 0 <= after <= last:
            return False
        return place[one.kind, one.microbatch, after][0] != s

    def end(where: tuple[int, int]) -> float:
        return start.get(where, 0.0) + duration(where[0], groups[where[0]][where[1]])

    moved = True
    while moved:
        moved = False
        for (kind, i, depth), (s, number) in place.items():
            bounds = [start.get((s, number), 0.0)]
            if number:
                held = 0 if times.hops_hidden else sum(sends(s, one) for one in groups[s][number - 1])
                bounds.append(end((s, number - 1)) + held * times.hop_seconds)
            need = {"F": ("F", i, depth - 1), "B": ("B", i, depth + 1), "W": ("B", i, depth)}[kind]
            need = ("F", i, depth) if kind == "B" and depth == last else need
            if need in place:
                hop = times.hop_seconds if place[need][0] != s else 0.0
                bounds.append(end(place[need]) + hop)
            moved |= max(bounds) > start.get((s, number), -1.0)
            start[s, number] = max(bounds)
    return max(end(where) for where in start)


def _groups(row: tuple[Pass, ...]) -> list[list[Pass]]:
    found: list[list[Pass]] = []
    joining = False
    for one in row:
        if joining:
            found[-1].append(one)
        else:
            found.append([one])
        joining = one.joined
    return found


# The closed form.


@given(numbers(max_stages=12, max_microbatches=40), usual_times())
def test_makespan_equals_simulation(given_numbers: Numbers, times: Times):
    exact = simulate(schedule(*given_numbers), times).makespan_seconds
    assert makespan(*given_numbers, times) == pytest.approx(exact, rel=1e-9)


@given(numbers(max_stages=5, max_microbatches=12), any_passes(), seconds(0, 4))
def test_makespan_of_unusual_times_is_a_lower_bound(given_numbers: Numbers, body: PassSeconds, hop: float):
    times = Times(body, hop_seconds=hop)
    exact = simulate(schedule(*given_numbers), times).makespan_seconds
    assert makespan(*given_numbers, times) <= exact * (1 + 1e-9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(st.integers(1, 6), st.integers(1, 20), usual_times(), seconds(0, 3))
def test_makespan_of_a_slow_last_stage(name: str, p: int, m: int, times: Times, extra: float):
    times = Times(times.body, {-1: PassSeconds(*(one + extra for one in times.body))})
    exact = run(name, p, m, times=times).makespan_seconds
    assert makespan(name, p, m, 1, times) == pytest.approx(exact)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("hops_hidden", [True, False])
@pytest.mark.parametrize("backward", [1.0, 1.2, 2.0])
@pytest.mark.parametrize("head", [0.1, 0.4, 1.5])
def test_makespan_of_uneven_stages_is_close(name: str, hops_hidden: bool, backward: float, head: float):
    body = PassSeconds(1, backward, 0.9)
    special = {0: PassSeconds(1.05, backward, 0.95), -1: PassSeconds(*(one + head for one in body))}
    times = Times(body, special, 0.05, hops_hidden)
    for p, m in ((2, 8), (4, 8), (4, 32), (8, 16), (8, 40)):
        v = 2 if name == "interleaved" else 1
        exact = run(name, p, m, v, times).makespan_seconds
        assert makespan(name, p, m, v, times) == pytest.approx(exact, rel=0.05)


@given(numbers(max_stages=12, max_microbatches=40))
def test_in_flight_equals_simulation(given_numbers: Numbers):
    name, p, m, _ = given_numbers
    found = simulate(schedule(*given_numbers), UNIT).peak_in_flight
    closed = tuple(in_flight(*given_numbers, stage) for stage in range(p))
    if name == "zb-v" and m < 3 * p / 2:  # the first stages do not quite reach it
        assert all(one <= limit for one, limit in zip(found, closed, strict=True))
    else:
        assert found == closed


def test_a_search_is_answered_at_once():
    """10,000 makespans and memories of the largest pipelines in less than 0.3 s of this process."""
    sizes = [(name, p, m) for name in SCHEDULES for p in (2, 8, 32, 128) for m in (1024, 2048, 4096)]
    many = [(name, p, m, 32 if name == "interleaved" else 1) for name, p, m in sizes]
    times = Times(PassSeconds(1, 1.1, 0.9), {-1: PassSeconds(1.2, 1.3, 1.1)}, hop_seconds=0.01)
    began = time.process_time()
    for number in range(10_000):
        one = many[number % len(many)]
        assert makespan(*one, times) > 0 and in_flight(*one) > 0
    assert time.process_time() - began < 0.3


# What does not exist.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("1f1c", 4, 8), "layout: schedule = '1f1c'; did you mean 1f1b?"),
        (("1f1b", 0, 8), "layout: pipe = 0; it must be a positive integer"),
        (
            ("1f1b", 4, 8, 2),
            "layout: schedule = 1f1b has one chunk a stage, not interleave = 2; "
            "fits: interleave = 1, or schedule = interleaved",
        ),
        (
            ("interleaved", 4, 8),
            "layout: schedule = interleaved with interleave = 1 is 1f1b; "
            "fits: interleave of 2 or more, or schedule = 1f1b",
        ),
        (
            ("interleaved", 4, 10, 2),
            "layout: schedule = interleaved runs microbatches in groups of pipe = 4, and 10 do not divide; "
            "fits: microbatches in {8, 12}",
        ),
        (
            ("interleaved", 4, 3, 2),
            "layout: schedule = interleaved runs microbatches in groups of pipe = 4, and 3 do not divide; "
            "fits: microbatches in {4}",
        ),
        (
            ("zb-v", 1, 8),
            "layout: schedule = zb-v needs two stages, not pipe = 1; fits: pipe of 2 or more",
        ),
        (
            ("zb-v", 4, 8, 4),
            "layout: schedule = zb-v places 2 chunks on a stage, not interleave = 4; "
            "fits: interleave in {1, 2}, or schedule = interleaved",
        ),
        (
            ("zb-v", 8, 4),
            "layout: schedule = zb-v needs a microbatch for each stage, and 4 are fewer than pipe = 8; "
            "fits: microbatches of 8 or more, or pipe of 4 or less",
        ),
        (
            ("dualpipe", 5, 20),
            "layout: schedule = dualpipe pairs its stages, and pipe = 5 is odd; fits: pipe in {4, 6}",
        ),
        (
            ("dualpipe", 4, 6),
            "layout: schedule = dualpipe fills pipe = 4 stages from both ends with an even number of at "
            "least 8 microbatches, not 6; fits: microbatches of 8 or more",
        ),
        (
            ("dualpipe", 4, 9),
            "layout: schedule = dualpipe fills pipe = 4 stages from both ends with an even number of at "
            "least 8 microbatches, not 9; fits: microbatches in {8, 10}",
        ),
    ],
)
def test_what_does_not_exist(wrong: tuple[Any, ...], message: str):
    with pytest.raises(LayoutError) as raised:
        schedule(*wrong)
    assert str(raised.value) == message
    name, p, m, v = cast(Numbers, (*wrong, 1)[:4])
    with pytest.raises(LayoutError):
        makespan(name, p, m, v, UNIT)
    with pytest.raises(LayoutError):
        in_flight(name, p, m, v)
