"""Pipeline schedules: published bubbles and memories, every dependency, and what a search asks of them."""

import time
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.pipeline import (
    PassSeconds,
    PipelineTimeline,
    Times,
    hops,
    least_makespan,
    makespan,
    sent_hops,
    simulate,
)
from meshwright.cost.pipeline.makespan import repeating
from meshwright.errors import LayoutError
from meshwright.layout.pipelines import SCHEDULES, PassTable, TablePass, pass_table, pipeline_schedule

UNIT = PassSeconds(1, 1, 1)
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
    if name == "lanes":
        return name, max(p, 2), max(m, 2), 1
    return name, p, m, 1


def seconds(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_subnormal=False)


@st.composite
def any_passes(draw: st.DrawFn) -> PassSeconds:
    return PassSeconds(draw(seconds(0.1, 4)), draw(seconds(0.1, 4)), draw(seconds(0, 4)))


@st.composite
def any_times(draw: st.DrawFn, num_depths: int) -> Times:
    """Other seconds at every depth."""
    return Times([draw(any_passes()) for _ in range(num_depths)], draw(seconds(0, 1)))


@st.composite
def times_of_layers(draw: st.DrawFn, num_depths: int) -> Times:
    """Depths of one or two layers, the first with the embedding and the last with the head."""
    body = draw(any_passes())
    layers = [draw(st.integers(1, 2)) for _ in range(num_depths)]
    ends = {0: draw(seconds(0, 0.1)), num_depths - 1: draw(seconds(0, 2))}
    depths = [[second * n + ends.get(d, 0) for second in body] for d, n in enumerate(layers)]
    return Times([PassSeconds(*one) for one in depths], draw(st.sampled_from([0, 0.01, 0.3])))


def num_depths(name: str, p: int, v: int = 1) -> int:
    record = SCHEDULES[name]
    return len(record.routes(p, record.chunks(v))[0])


def alike(name: str, p: int, v: int = 1, body: PassSeconds = UNIT, hop_seconds: float = 0.0) -> Times:
    return Times([body] * num_depths(name, p, v), hop_seconds)


def run(
    name: str, p: int, m: int, v: int = 1, body: PassSeconds = UNIT, hop_seconds: float = 0
) -> PipelineTimeline:
    return simulate(pass_table(name, p, m, v), alike(name, p, v, body, hop_seconds))


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
    timeline = run("dualpipe", p, m, body=PassSeconds(forward, backward, weight))
    whole = backward + weight
    bubble = (p / 2 - 1) * ((forward + whole) + whole - 3 * weight)
    assert timeline.makespan_seconds - m * (forward + whole) == bubble
    assert timeline.table.weight_copies == 2


def test_a_row_of_interleaved():
    """The first device of figure 4 of SC21 (p = 4, v = 2): ten forward passes, then one and one."""
    row = pass_table("interleaved", 4, 8, 2).rows[0]
    assert [(one.kind, one.microbatch, one.chunk) for one in row[:14]] == [
        *(("F", i, 0) for i in range(4)),
        *(("F", i, 1) for i in range(4)),
        *(("F", 4, 0), ("F", 5, 0)),
        *(("F", 6, 0), ("B", 0, 1), ("F", 7, 0), ("B", 1, 1)),
    ]


def test_a_row_of_zb_h1():
    """The last of three stages leaves two W for later; the first leaves none."""
    first, _, last = pass_table("zb-h1", 3, 4).rows
    assert [one.kind for one in last] == list("FBFBFBWFBWWW")
    assert [one.kind for one in first] == list("FFFBWFBWBWBW")


def test_a_hop_delays_who_waits_for_it():
    # 4 F on the first stage, a hop, F; 4 B (of 2) on the second, a hop, B.
    assert run("gpipe", 2, 4, hop_seconds=0.5).makespan_seconds == 5 + 0.5 + 10 + 0.5


def test_the_turn_of_the_v_is_no_hop():
    timeline = run("zb-v", 2, 2, hop_seconds=100.0)
    turn = [e for e in timeline.events if e.stage == 1 and e.kind == "F" and e.microbatch == 0]
    assert turn[0].end == turn[1].start


# Every schedule.


@given(numbers())
def test_every_pass_runs_once(given_numbers: Numbers):
    table = pass_table(*given_numbers)
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
    table = pass_table(*given_numbers)
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
    by_depth = times.depths
    chain = sum(one.forward + one.backward for one in by_depth)
    num_hops = sum(one.stage != two.stage for one, two in pairwise(table.routes[0]))
    assert timeline.makespan_seconds >= chain + 2 * num_hops * times.hop_seconds - 1e-9
    assert sum(timeline.busy_seconds) == pytest.approx(
        table.num_microbatches * sum(one.total for one in by_depth)
    )


def _one_pass_at_a_time(table: PassTable, timeline: PipelineTimeline) -> None:
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
    table = pass_table(*given_numbers)
    times = data.draw(any_times(table.num_depths))
    assert simulate(table, times).makespan_seconds == pytest.approx(_relaxed(table, times))


def _relaxed(table: PassTable, times: Times) -> float:
    """The makespan by relaxing every constraint until none moves a pass."""
    last = table.num_depths - 1
    start: dict[tuple[int, int], float] = {}
    groups = {s: _groups(row) for s, row in enumerate(table.rows)}
    place = {
        (one.kind, one.microbatch, table.depths[s, one.chunk]): (s, number)
        for s, found in groups.items()
        for number, group in enumerate(found)
        for one in group
    }

    def duration(s: int, group: list[TablePass]) -> float:
        total = 0.0
        for one in group:
            body = times.depths[table.depths[s, one.chunk]]
            whole = one.kind == "B" and (one.microbatch, one.chunk) not in table.split[s]
            total += {"F": body.forward, "B": body.backward, "W": body.weight}[one.kind]
            total += body.weight if whole else 0.0
        return total

    def end(where: tuple[int, int]) -> float:
        return start.get(where, 0.0) + duration(where[0], groups[where[0]][where[1]])

    moved = True
    while moved:
        moved = False
        for (kind, i, depth), (s, number) in place.items():
            bounds = [start.get((s, number), 0.0)]
            if number:
                bounds.append(end((s, number - 1)))
            need = {"F": ("F", i, depth - 1), "B": ("B", i, depth + 1), "W": ("B", i, depth)}[kind]
            need = ("F", i, depth) if kind == "B" and depth == last else need
            if need in place:
                hop = times.hop_seconds if place[need][0] != s else 0.0
                bounds.append(end(place[need]) + hop)
            moved |= max(bounds) > start.get((s, number), -1.0)
            start[s, number] = max(bounds)
    return max(end(where) for where in start)


def _groups(row: tuple[TablePass, ...]) -> list[list[TablePass]]:
    found: list[list[TablePass]] = []
    joining = False
    for one in row:
        if joining:
            found[-1].append(one)
        else:
            found.append([one])
        joining = one.joined
    return found


# What a search asks: the makespan without every microbatch, and a bound below it.


@given(numbers(max_stages=6, max_microbatches=80), st.data())
def test_makespan_equals_simulation(given_numbers: Numbers, data: st.DataObject):
    name, p, _, v = given_numbers
    times = data.draw(times_of_layers(num_depths(name, p, v)) | any_times(num_depths(name, p, v)))
    exact = simulate(pass_table(*given_numbers), times).makespan_seconds
    assert makespan(*given_numbers, times) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gpipe"])
@pytest.mark.parametrize("p", [2, 4, 6])
def test_tables_grow_by_repetition(name: str, p: int):
    """A short table says what many rounds more take; gpipe's grows in two places and is simulated whole."""
    v = 2 if name == "interleaved" else 1
    times = alike(name, p, v, PassSeconds(1, 1.2, 0.9), 0.1)
    short = next(found for each in (2, 4, 8) if (found := repeating(name, p, each * p, v)))
    for rounds in (0, 1, 7, 15):
        m = short.microbatches + rounds * short.round
        exact = simulate(pass_table(name, p, m, v), times).makespan_seconds
        assert short.seconds(m, times) == pytest.approx(exact, rel=1e-12)
    assert repeating("gpipe", p, 4 * p, 1) is None


@given(numbers(max_stages=8, max_microbatches=30), st.data())
def test_no_step_is_shorter_than_the_bound(given_numbers: Numbers, data: st.DataObject):
    name, p, _, v = given_numbers
    times = data.draw(times_of_layers(num_depths(name, p, v)) | any_times(num_depths(name, p, v)))
    exact = simulate(pass_table(*given_numbers), times).makespan_seconds
    assert _bound(*given_numbers, times) <= exact * (1 + 1e-9)


def _bound(name: str, p: int, m: int, v: int, times: Times) -> float:
    forward, backward, weight = zip(*times.depths, strict=True)
    return float(least_makespan(name, p, m, v, (forward, backward, weight), times.hop_seconds))


@pytest.mark.parametrize(
    ("name", "equal", "slow_head"),
    [
        ("gpipe", 0, 0),
        ("1f1b", 0, 0),
        ("interleaved", 0, 0.01),
        ("zb-h1", 0.02, 0.01),
        ("zb-v", 0.01, 0.05),
        ("dualpipe", 0.07, 0.05),
    ],
)
@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 64), (8, 16), (16, 64)])
def test_the_bound_is_close(name: str, equal: float, slow_head: float, p: int, m: int):
    """Shares of the makespan that it lacks, for equal stages without hops and for a slow head with them."""
    v = 2 if name == "interleaved" else 1
    body = PassSeconds(1, 1.2, 0.9)
    times = alike(name, p, v, body)
    assert _bound(name, p, m, v, times) == pytest.approx(makespan(name, p, m, v, times), rel=equal or 1e-9)
    times = Times([*[body] * (num_depths(name, p, v) - 1), PassSeconds(1.3, 1.5, 1.2)], 0.05)
    exact = makespan(name, p, m, v, times)
    assert _bound(name, p, m, v, times) == pytest.approx(exact, rel=slow_head or 1e-9)


def test_bounds_of_many_layouts_at_once():
    times = [Times([PassSeconds(1, b, 0.5)] * 4, 0.1 * b) for b in (1.0, 2.0, 3.0)]
    depths = [[[one.depths[d][kind] for one in times] for d in range(4)] for kind in range(3)]
    forward, backward, weight = depths
    hop_seconds = np.array([one.hop_seconds for one in times])
    found = least_makespan("1f1b", 4, np.array([8, 12, 20]), 1, (forward, backward, weight), hop_seconds)
    one_by_one = [_bound("1f1b", 4, m, 1, each) for m, each in zip((8, 12, 20), times, strict=True)]
    assert found == pytest.approx(one_by_one)


@given(numbers(max_stages=12, max_microbatches=40))
def test_in_flight_equals_simulation(given_numbers: Numbers):
    name, p, m, v = given_numbers
    found = run(*given_numbers).peak_in_flight
    closed = tuple(SCHEDULES[name].in_flight(p, m, v, stage) for stage in range(p))
    # The first stages of zb-v do not quite reach it; those of lanes have room for the most, all of them.
    if name == "lanes" or (name == "zb-v" and m < 3 * p / 2):
        assert all(one <= limit for one, limit in zip(found, closed, strict=True))
    else:
        assert found == closed


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gpipe"])
def test_a_search_is_answered_at_once(name: str):
    """A makespan of 16 stages and 1,024 microbatches, the table made: less than 40 ms of this process."""
    v = 8 if name == "interleaved" else 1
    body = PassSeconds(1, 1.1, 0.9)
    times = Times([*[body] * (num_depths(name, 16, v) - 1), PassSeconds(1.2, 1.3, 1.1)], 0.01)
    first = makespan(name, 16, 1024, v, times)
    began = time.process_time()
    assert makespan(name, 16, 1024, v, times) == first
    assert time.process_time() - began < 0.04


# Hops.


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "sent"),
    [
        ("1f1b", 3, 5, 1, [(5, 0), (5, 5), (0, 5)]),
        # Depths 0 and 2 are on stage 0, 1 and 3 on stage 1.
        ("interleaved", 2, 4, 2, [(8, 4), (4, 8)]),
        # Down and up: the turn on the last stage sends nothing.
        ("zb-v", 3, 3, 1, [(3, 3), (6, 6), (3, 3)]),
        # Half of the microbatches in each direction.
        ("dualpipe", 4, 8, 1, [(4, 4), (8, 8), (8, 8), (4, 4)]),
        # Every stage in every tick, at the ends to nobody.
        ("lanes", 3, 5, 1, [(7, 7), (7, 7), (7, 7)]),
    ],
)
def test_hops_by_hand(name: str, p: int, m: int, v: int, sent: list[tuple[int, int]]):
    assert sent_hops(name, p, m, v) == sent


def test_what_hops_add_by_hand():
    """GPipe's step waits for p - 1 hops forward and p - 1 back, whatever m; each middle stage sends 2 m."""
    found = hops("gpipe", 4, 8, 1, alike("gpipe", 4, hop_seconds=0.25))
    assert (found.forward, found.backward, found.count, found.seconds) == (8, 8, 16, 0.25)
    assert found.exposed_seconds == 6 * 0.25
    assert found.makespan_seconds == 3 * 11 + 1.5
    # 1F1B waits for a round trip of 6 hops in every 4 microbatches, and of 4 for the last three.
    late = hops("1f1b", 4, 8, 1, alike("1f1b", 4, hop_seconds=0.25))
    assert late.exposed_seconds == (6 + 6 + 4) * 0.25


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
        pass_table(*wrong)
    assert str(raised.value) == message
    name, p, m, v = cast(Numbers, (*wrong, 1)[:4])
    with pytest.raises(LayoutError):
        makespan(name, p, m, v, Times([UNIT]))
    with pytest.raises(LayoutError):
        pipeline_schedule(name).in_flight(p, m, v)
    assert name not in SCHEDULES or not SCHEDULES[name].exists(p, m, v)
