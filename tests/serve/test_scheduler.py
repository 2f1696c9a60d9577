"""The scheduler: first come first served, every slot free or taken once, a bounded queue."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshwright.errors import RequestError
from meshwright.serve.scheduler import Scheduler
from meshwright.serve.sequence import Request, Sequence


def sequence() -> Sequence:
    return Sequence(Request((1,)), max_tokens=4, index=0, emit=lambda _: None)


def test_slots_are_given_in_order_of_arrival():
    scheduler = Scheduler(num_slots=2, max_waiting=8)
    first, second, third = sequences = [sequence() for _ in range(3)]
    scheduler.add(sequences)
    assert [scheduler.admit(), scheduler.admit(), scheduler.admit()] == [first, second, None]
    assert (first.slot, second.slot, third.slot) == (0, 1, None)
    scheduler.release(first, "stop")
    assert scheduler.admit() is third
    assert third.slot == 0


def test_a_full_queue_refuses_all_or_nothing():
    scheduler = Scheduler(num_slots=1, max_waiting=2)
    scheduler.add([sequence(), sequence()])
    with pytest.raises(
        RequestError, match=r"^2 answers asked for, but the queue has room for 1; retry later$"
    ) as e:
        scheduler.add([sequence(), sequence()])
    assert (e.value.status, e.value.code) == (429, "queue_full")
    assert scheduler.num_waiting == 2


def test_a_request_that_can_never_fit_is_the_users_mistake():
    message = r"^4 answers in one request, but the server holds at most 3$"
    with pytest.raises(RequestError, match=message) as error:
        Scheduler(num_slots=1, max_waiting=2).add([sequence() for _ in range(4)])
    assert (error.value.status, error.value.param) == (400, "n")


def test_releasing_a_waiting_sequence_leaves_the_slots_alone():
    scheduler = Scheduler(num_slots=1, max_waiting=2)
    running, waiting = sequence(), sequence()
    scheduler.add([running, waiting])
    scheduler.admit()
    scheduler.release(waiting, "cancelled")
    assert (scheduler.num_waiting, scheduler.running) == (0, {0: running})


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, admissions and departures, against two plain lists."""

    @initialize(num_slots=st.integers(1, 4), max_waiting=st.integers(0, 4))
    def start(self, num_slots, max_waiting):
        self.num_slots, self.max_waiting = num_slots, max_waiting
        self.scheduler = Scheduler(num_slots, max_waiting)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @rule(count=st.integers(1, 3))
    def arrive(self, count):
        sequences = [sequence() for _ in range(count)]
        fits = len(self.waiting) + len(self.running) + count <= self.num_slots + self.max_waiting
        try:
            self.scheduler.add(sequences)
        except RequestError:
            assert not fits
        else:
            assert fits
            self.waiting += sequences

    @rule()
    def admit(self):
        admitted = self.scheduler.admit()
        if not self.waiting or len(self.running) == self.num_slots:
            assert admitted is None
        else:
            assert admitted is self.waiting[0]
            self.running.append(self.waiting.pop(0))

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data())
    def depart(self, data):
        leaving = data.draw(st.sampled_from([*self.waiting, *self.running]))
        self.scheduler.release(leaving, "cancelled")
        (self.waiting if leaving in self.waiting else self.running).remove(leaving)

    @invariant()
    def slots_are_held_once(self):
        assert sorted(s.slot for s in self.running if s.slot is not None) == sorted(self.scheduler.running)
        assert all(self.scheduler.running[s.slot] is s for s in self.running if s.slot is not None)
        assert self.scheduler.num_waiting == len(self.waiting)
        assert all(0 <= slot < self.num_slots for slot in self.scheduler.running)


TestSchedulerMachine = SchedulerMachine.TestCase
