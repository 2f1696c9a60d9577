"""The scheduler: first come first served, every slot and page free or held, a bounded queue."""

import collections
import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.serve.engine.sequences import limits, run, sequence, tokens_of

from meshwright.errors import RequestError
from meshwright.models.layer_kinds import Window
from meshwright.serve.engine.batch import PENDING, Batch
from meshwright.serve.engine.pages import NO_PAGE, Pages
from meshwright.serve.engine.request import Request
from meshwright.serve.engine.scheduler import Scheduler
from meshwright.serve.engine.sequence import TokenSequence


def test_slots_are_given_in_order_of_arrival():
    scheduler = Scheduler(limits(), max_waiting=8)
    first, second, third = sequences = [sequence() for _ in range(3)]
    scheduler.add(sequences)
    scheduler.schedule()
    assert (first.slot, second.slot, third.slot) == (0, 1, None)
    scheduler.release(first, "stop")
    scheduler.schedule()
    assert third.slot == 0


def test_clients_and_requests_take_turns():
    scheduler = Scheduler(limits(num_slots=3), max_waiting=9, is_fair=True)
    requests = {"many": ("a", 5), "another of a": ("a", 1), "of b": ("b", 1), "late": ("b", 1)}
    by_name: dict[str, list[TokenSequence]] = {}
    for name, (client, count) in requests.items():
        request = Request((1,), client=client)
        group = by_name[name] = [
            TokenSequence(request, 4, index, lambda _: None, group=name) for index in range(count)
        ]
        if name != "late":
            scheduler.add(group)
    scheduler.schedule()
    started = [name for name, group in by_name.items() if any(one.slot is not None for one in group)]
    assert started == ["many", "another of a", "of b"]
    scheduler.add(by_name["late"])
    scheduler.release(by_name["another of a"][0], "stop")
    scheduler.schedule()
    # Both clients have one sequence running, and request `late` has none.
    assert by_name["late"][0].slot is not None and by_name["many"][1].slot is None
    scheduler.release(by_name["of b"][0], "stop")
    scheduler.schedule()
    assert by_name["many"][1].slot is not None


def test_a_client_with_most_slots_yields_to_others():
    scheduler = Scheduler(limits(num_slots=4, chunk=32), max_waiting=9, is_fair=True)

    def of(client: str, count: int, priority: int = 0) -> list[TokenSequence]:
        request = Request((1, 2), client=client, priority=priority)
        return [TokenSequence(request, 4, i, lambda _: None, group=client) for i in range(count)]

    many, few, urgent = of("a", 5), of("b", 3), of("c", 1, priority=-1)
    scheduler.add(many)
    scheduler.schedule()
    scheduler.add(few)
    batch = scheduler.schedule()
    has_slot = [one.slot is not None for one in many + few]
    assert batch and has_slot == [True, True, False, False, False, True, True, False]
    assert {id(work.sequence) for work in batch.works} == {id(one) for one in [*many[:2], *few[:2]]}
    scheduler.add(of("d", 1, priority=1))  # takes no slot from those with a higher priority
    scheduler.add(urgent)
    scheduler.schedule()
    assert urgent[0].slot is not None and sum(one.num_preempted for one in many + few) == 3
    assert sorted(sum(one.slot is not None for one in group) for group in (many, few)) == [1, 2]


def test_a_clients_prompts_leave_room_for_those_of_others():
    scheduler = Scheduler(limits(num_slots=3), max_waiting=9, is_fair=True)  # two blocks a step
    many = [sequence(12, first=20 * i, client="a") for i in range(2)]
    scheduler.add(many)
    scheduler.schedule()
    few = sequence(3, client="b")
    scheduler.add([few])
    batch = scheduler.schedule()
    assert batch and [work.sequence for work in batch.works] == [few, many[0]]
    # Over the next steps both clients get equal numbers of tokens, up to a step's budget.
    scheduler.release(few, "stop")
    scheduler.add([sequence(11, first=60, client="b")])
    given = collections.Counter[str]()
    for _ in range(3):
        batch = scheduler.schedule()
        for work in batch.works if batch else ():
            given[work.sequence.request.client] += len(work.tokens)
    assert abs(given["a"] - given["b"]) <= 8


def test_the_urgent_come_first():
    scheduler = Scheduler(limits(num_slots=1), max_waiting=8)
    calm, urgent = sequence(), sequence(priority=-1)
    scheduler.add([calm, urgent])
    scheduler.schedule()
    assert (urgent.slot, calm.slot) == (0, None)


def test_a_long_prompt_goes_in_chunks_beside_those_who_generate():
    scheduler = Scheduler(limits(), max_waiting=8, prefix_cache=False)
    scheduler.add([sequence(2, max_tokens=9), sequence(13, first=20)])
    steps = []
    for _ in range(3):
        batch = scheduler.schedule()
        assert batch
        steps.append(tokens_of(batch))
    # Two tokens take a block of the chunk of eight; the answer goes on from tokens that nobody has read.
    assert steps == [
        [(0, 1), (20, 21, 22, 23)],
        [(PENDING,), tuple(range(24, 32))],
        [(PENDING,), (32,)],
    ]


def test_a_prompt_takes_fewer_tokens_of_a_step_the_longer_its_attention():
    """A chunk of 8 takes 8 x (1 + 4 / 8) = 12 at the beginning, behind position 16 8 x (1 + 20 / 8) = 28."""
    even = dataclasses.replace(limits(), context=64, even_context=8.0)
    scheduler = Scheduler(even, max_waiting=8, prefix_cache=False)
    scheduler.add([sequence(24)])
    batches = [scheduler.schedule() for _ in range(4)]
    assert [sum(map(len, tokens_of(batch))) for batch in batches] == [8, 8, 4, 4]


def test_pages_are_taken_from_whoever_came_last():
    scheduler = Scheduler(limits(num_pages=4, chunk=16), max_waiting=8, prefix_cache=False)
    early, late = sequence(8, max_tokens=8), sequence(7, first=50, max_tokens=8)
    scheduler.add([early, late])
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first and second
    assert tokens_of(first) == [tuple(range(8)), tuple(range(50, 57))]
    assert tokens_of(second) == [(PENDING,)]  # its third page was the other's
    assert (late.slot, late.pages, late.num_computed, len(scheduler.waiting)) == (None, Pages(), 0, 1)
    for batch in (first, second):
        run(scheduler, batch)
    assert late.tokens[-1] == 99  # what was sampled before it lost its pages still counts
    while batch := scheduler.schedule():
        run(scheduler, batch)
    assert (early.num_generated, late.num_generated) == (8, 8)
    assert (early.num_preempted, late.num_preempted) == (0, 1)
    assert scheduler.replicas[0].pool.num_free == 4


def test_who_begins_like_another_shares_its_pages():
    scheduler = Scheduler(limits(num_slots=3, chunk=16), max_waiting=8)
    one, like_it, other = sequence(7), sequence(7), sequence(7, first=30)
    scheduler.add([one, like_it, other])
    batch = scheduler.schedule()
    assert batch
    # Whoever begins like one that is being computed waits for its pages.
    assert [work.sequence for work in batch.works] == [one, other]
    run(scheduler, batch)
    later = scheduler.schedule()
    assert later
    assert tokens_of(later) == [(99,), (99,), (4, 5, 6)]
    assert like_it.pages.whole[0] == one.pages.whole[0] != other.pages.whole[0]


def test_a_full_queue_refuses_all_or_nothing():
    scheduler = Scheduler(limits(num_slots=1), max_waiting=2)
    scheduler.add([sequence(), sequence()])
    with pytest.raises(
        RequestError, match=r"^2 answers asked for, but the queue has room for 1; retry later$"
    ) as e:
        scheduler.add([sequence(), sequence()])
    assert (e.value.status, e.value.code) == (429, "queue_full")
    assert len(scheduler.waiting) == 2


def test_a_request_that_can_never_fit_is_the_users_mistake():
    message = r"^4 answers in one request, but the server holds at most 3$"
    with pytest.raises(RequestError, match=message) as error:
        Scheduler(limits(num_slots=1), max_waiting=2).add([sequence() for _ in range(4)])
    assert (error.value.status, error.value.param) == (400, "n")


def test_releasing_a_waiting_sequence_leaves_the_slots_alone():
    scheduler = Scheduler(limits(num_slots=1), max_waiting=2)
    running, waiting = sequence(), sequence()
    scheduler.add([running, waiting])
    scheduler.schedule()
    scheduler.release(waiting, "cancelled")
    assert (len(scheduler.waiting), scheduler.running) == (0, [running])


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps, results and departures: nothing is lost, and nothing is held twice."""

    @initialize(
        num_slots=st.integers(1, 3),
        num_pages=st.integers(4, 9),
        prefix_cache=st.booleans(),
        num_replicas=st.integers(1, 2),
        window=st.none() | st.builds(Window, st.sampled_from([3, 4, 6]), st.booleans()),
        num_host_pages=st.sampled_from([0, 1, 3]),
        num_snapshots=st.sampled_from([0, 1, 2]),
        is_fair=st.booleans(),
    )
    def start(
        self, num_slots, num_pages, prefix_cache, num_replicas, window, num_host_pages, num_snapshots, is_fair
    ):
        one = dataclasses.replace(
            limits(num_slots, num_pages),
            num_host_pages=0 if window else num_host_pages,
            has_states=num_snapshots > 0,
            num_snapshots=num_snapshots,
            num_host_snapshots=0 if window else min(num_snapshots, num_host_pages),
        )
        if window is not None:  # for one sequence alone: a window and a chunk, and a page that both begin on
            one = dataclasses.replace(one, window=window, num_window_pages=5)
        self.limits = dataclasses.replace(one, num_slots=num_slots * num_replicas, num_replicas=num_replicas)
        self.scheduler = Scheduler(self.limits, max_waiting=3, prefix_cache=prefix_cache, is_fair=is_fair)
        self.under_way: list[Batch] = []

    @rule(
        num_tokens=st.integers(1, 11),
        first=st.sampled_from([0, 0, 40]),
        priority=st.integers(0, 1),
        client=st.sampled_from("ab"),
    )
    def arrive(self, num_tokens, first, priority, client):
        fits = len(self.scheduler.unfinished) < self.limits.num_slots + 3
        try:
            self.scheduler.add([sequence(num_tokens, 4, first, priority, client)])
        except RequestError:
            assert not fits
        else:
            assert fits

    @precondition(lambda self: len(self.under_way) < 2)
    @rule()
    def step(self):
        unfinished = bool(self.scheduler.unfinished)
        batch = self.scheduler.schedule()
        assert batch or self.under_way or not unfinished
        if batch:
            of_replica = collections.Counter[int]()
            for work in batch.works:
                padded = -(-len(work.tokens) // 4) * 4 if len(work.tokens) > 1 else 0
                of_replica[work.slot // self.limits.slots_per_replica] += padded
            assert max(of_replica.values()) <= self.limits.chunk
            # No sequence loses its slot or pages to another in the step that computes it.
            assert all(work.sequence.slot == work.slot for work in batch.works)
            self.under_way.append(batch)

    @precondition(lambda self: self.under_way)
    @rule()
    def result(self):
        run(self.scheduler, self.under_way.pop(0))

    @precondition(lambda self: self.scheduler.unfinished)
    @rule(data=st.data())
    def depart(self, data):
        self.scheduler.release(data.draw(st.sampled_from(self.scheduler.unfinished)), "cancelled")

    @invariant()
    def slots_are_held_once(self):
        slots = [one.slot for one in self.scheduler.running]
        assert len(set(slots)) == len(slots) <= self.limits.num_slots
        assert all(one.slot is None and one.pages == Pages() for one in self.scheduler.waiting)

    @invariant()
    def every_page_is_free_or_held(self):
        for number, replica in enumerate(self.scheduler.replicas):
            nodes = replica.prefixes._nodes if replica.prefixes is not None else ()
            here = [
                one.pages
                for one in self.scheduler.running
                if one.slot is not None and one.slot // self.limits.slots_per_replica == number
            ]
            held = [pages.whole for pages in here] + [[node.page] for node in nodes]
            self._are_held(replica.pool, held)
            if replica.window_pool is not None:
                held = [pages.held_of_window for pages in here]
                held += [[node.window_page] for node in nodes if node.window_page != NO_PAGE]
                self._are_held(replica.window_pool, held)

    @invariant()
    def what_waits_on_the_host_is_behind_what_is_here(self):
        for replica in self.scheduler.replicas:
            if replica.prefixes is not None and replica.host_pool is not None:
                waiting = replica.prefixes._on_host
                self._are_held(replica.host_pool, [[node.host_page] for node in waiting])
                assert all(node.page == NO_PAGE for node in waiting)
                for node in replica.prefixes._nodes:
                    assert node.host_page == NO_PAGE and node.parent not in waiting

    @invariant()
    def every_snapshot_is_free_or_held(self):
        for number, replica in enumerate(self.scheduler.replicas):
            if replica.prefixes is None or replica.snapshots is None:
                continue
            here, on_host = replica.prefixes._with_snapshot, replica.prefixes._with_host_snapshot
            of_sequences = [
                [*one.snapshots.values()]
                for one in self.scheduler.running
                if one.slot is not None and one.slot // self.limits.slots_per_replica == number
            ]
            self._are_held(replica.snapshots, [*of_sequences, *([node.snapshot] for node in here)])
            assert not [node for node in here if node in on_host]
            known = [*replica.prefixes._nodes, *replica.prefixes._on_host]
            assert {*here} == {node for node in known if node.snapshot != NO_PAGE}
            assert {*on_host} == {node for node in known if node.host_snapshot != NO_PAGE}
            if replica.host_snapshots is not None:
                self._are_held(replica.host_snapshots, [[node.host_snapshot] for node in on_host])

    def _are_held(self, pool, held):
        holders = collections.Counter(page for pages in held for page in pages)
        assert pool.num_free + len(holders) == pool.num_pages
        assert all(pool.holders(page) == count for page, count in holders.items())


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=30)
