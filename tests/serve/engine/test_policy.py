"""Policies by themselves, and schedulers whose policy decides otherwise."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.serve.engine.sequences import limits, run, sequence, tokens_of

from meshwright.serve.engine.limits import IdleSeconds
from meshwright.serve.engine.policy import Batched, Burst, Interleaved, Policy, PromptBudget, policy_of
from meshwright.serve.engine.prefill_budget import PrefillBudget
from meshwright.serve.engine.replica import Replica
from meshwright.serve.engine.scheduler import Scheduler
from meshwright.serve.engine.sequence import TokenSequence

LIMITS = limits(num_slots=4, chunk=8)  # blocks of 4
IDLE = IdleSeconds(((1, 0.1), (2, 0.1), (4, 0.2)), 0.01)


def queue(*running: TokenSequence, waiting: Sequence[TokenSequence] = ()) -> Any:
    is_generating = any(one.num_uncomputed == 1 for one in running)
    free = LIMITS.num_slots - len(running)
    return SimpleNamespace(running=running, waiting=waiting, num_free_slots=free, is_generating=is_generating)


def test_a_budget_has_whole_blocks_and_a_token_of_every_sequence_that_generates():
    replica, budget = Replica(LIMITS, 0, prefix_cache=False), PromptBudget(LIMITS)
    for num_tokens, taken in ((1, 1), (3, 3), (13, 4), (13, 0), (1, 1)):
        one = sequence(num_tokens)
        assert budget.num_tokens(one, replica) == taken
        budget.take(one, replica, taken)
    assert not budget.has_room(replica)
    assert PromptBudget(LIMITS, max_time=0.0).num_tokens(sequence(13), replica) == LIMITS.block


def test_an_interleaved_step_generates_and_takes_prompts():
    budget = Interleaved(LIMITS).budget(queue(sequence(1)))
    assert budget.generates and budget.starts


def test_a_batch_starts_when_nothing_runs_and_generates_when_all_is_prefilled():
    policy = policy_of("batched", LIMITS, IDLE)
    assert isinstance(policy, Batched)
    budgets = [policy.budget(queue()), policy.budget(queue(sequence(3)))]
    policy.hold_nothing()
    budgets.append(policy.budget(queue(sequence(1))))
    assert [(one.generates, one.starts) for one in budgets] == [(False, True)] * 2 + [(True, False)]


def test_a_burst_takes_the_blocks_that_wait_and_at_most_two_chunks():
    burst, generating = Burst(LIMITS), sequence(1)
    assert burst.num_blocks(queue()) == 0  # and from now on four blocks
    waiting = [sequence(4), sequence(7)]
    assert burst.num_blocks(queue(generating, waiting=waiting)) == 2  # of three, in a program of two
    assert burst.num_blocks(queue(generating, waiting=waiting[:1])) == 1
    assert burst.num_blocks(queue(generating, waiting=waiting)) == 0  # three are more than are left
    assert burst.num_blocks(queue(generating, waiting=waiting[:1])) == 0


class PrefillFirst(Policy):
    """Prompts before answers, the shortest first; who has generated least gives its pages back."""

    def budget(self, queue: Any) -> PromptBudget:
        has_prompts = queue.waiting or any(one.num_uncomputed > 1 for one in queue.running)
        return PromptBudget(LIMITS, generates=not has_prompts)

    def admission_order(self, waiting: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
        return sorted(waiting, key=lambda one: one.num_prompt)

    def victim(self, running: Sequence[TokenSequence]) -> TokenSequence:
        return min(running, key=lambda one: one.num_generated)


def test_a_policy_orders_admission_and_holds_answers_while_prompts_are_left():
    scheduler = Scheduler(LIMITS, 8, PrefillFirst(), prefix_cache=False)
    long, short = sequence(10), sequence(3, first=50)
    scheduler.add([long, short])
    batches = [scheduler.schedule() for _ in range(3)]
    assert [tokens_of(one) for one in batches[:2]] == [
        [(50, 51, 52), (0, 1, 2, 3)],
        [tuple(range(4, 10))],
    ]
    assert batches[2] and [work.sequence for work in batches[2].works] == [long, short]


def test_a_policy_chooses_who_gives_its_pages_back():
    scheduler = Scheduler(limits(num_pages=4), 8, PrefillFirst(), prefix_cache=False)
    late, early = sequence(7, max_tokens=8), sequence(6, first=50, max_tokens=8)
    scheduler.add([early])
    for _ in range(2):
        batch = scheduler.schedule()
        assert batch
        run(scheduler, batch)
    scheduler.add([late])
    while not (late.num_preempted or early.num_preempted):
        batch = scheduler.schedule()
        assert batch
        run(scheduler, batch)
    assert (early.num_preempted, late.num_preempted) == (0, 1)


def test_measured_steps_bound_the_prompts_of_an_interleaved_policy():
    budget = PrefillBudget(IDLE, LIMITS)
    policy, replica = Interleaved(LIMITS, budget), Replica(LIMITS, 0, prefix_cache=False)
    time = budget.prompt_time()
    assert time == pytest.approx((2.5 - 1) * 0.2 / 0.01)
    assert policy.budget(queue(sequence(1))).num_tokens(sequence(13), replica) == 8
    budget.prompt_time = lambda: 5.0
    assert policy.budget(queue(sequence(1))).num_tokens(sequence(13), replica) == 4
