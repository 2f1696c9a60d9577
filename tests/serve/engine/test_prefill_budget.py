"""How long prompts hold up those that generate: the prefill budget over devices of known times."""

from dataclasses import replace
from math import inf

import pytest
from tests.serve.engine.sequences import run, sequence

from meshwright.serve.engine.batch import Batch, SequenceWork
from meshwright.serve.engine.limits import IdleSeconds, Limits
from meshwright.serve.engine.policy import MAX_BURST_CHUNKS, Interleaved
from meshwright.serve.engine.prefill_budget import MAX_SLOWDOWN, PATIENCE, PrefillBudget
from meshwright.serve.engine.scheduler import Scheduler

LIMITS = Limits(
    num_slots=8, context=32_768, page_size=64, num_pages=3000, chunk=512, block=16, even_context=1562.0
)
IDLE = IdleSeconds(((1, 0.004), (2, 0.004), (4, 0.005), (8, 0.006)), 0.0001)


def budgeted(budget: PrefillBudget | None, limits: Limits = LIMITS) -> Scheduler:
    return Scheduler(limits, 8, Interleaved(limits, budget), prefix_cache=False)


def generating(number: int) -> list:
    return [sequence(2, max_tokens=30_000, first=100 * one) for one in range(number)]


def test_the_room_grows_while_prompts_wait_and_shrinks_when_they_do_not():
    budget, room = PrefillBudget(IDLE, LIMITS), (MAX_SLOWDOWN - 1) * 0.006 / 0.0001
    assert budget.prompt_time() == pytest.approx(room)
    for _ in range(2 * PATIENCE):
        budget.scheduled(is_waiting=True)
    assert budget.prompt_time() == pytest.approx(room * (4 * MAX_SLOWDOWN - 1) / (MAX_SLOWDOWN - 1))
    for _ in range(3 * PATIENCE):
        budget.scheduled(is_waiting=False)
    assert budget.prompt_time() == pytest.approx(room)


def test_a_step_that_the_machine_held_up_tells_little():
    """As many of ten times its length as of a fifth leave what is known between them."""
    budget = PrefillBudget(IDLE, LIMITS)
    scheduler = Scheduler(LIMITS, max_waiting=8)
    scheduler.add(generating(4))
    run(scheduler, scheduler.schedule() or Batch(()))
    plain = scheduler.schedule()
    assert plain
    for _ in range(100):
        budget.measured(plain, 0.05)
        budget.measured(plain, 0.001)
    assert 0.001 < 0.005 * budget.prompt_time() / PrefillBudget(IDLE, LIMITS).prompt_time() < 0.05


def test_a_slower_machine_changes_nothing_and_slower_prompts_leave_less_room():
    budget = PrefillBudget(IDLE, LIMITS)
    scheduler = Scheduler(LIMITS, max_waiting=8)
    scheduler.add(generating(4))
    run(scheduler, scheduler.schedule() or Batch(()))
    plain = scheduler.schedule()
    assert plain and plain.figures[0] == 4
    for _ in range(40):
        budget.measured(plain, 0.010)  # all twice as slow
    assert budget.prompt_time() == pytest.approx(2 * (MAX_SLOWDOWN - 1) * 0.006 / 0.0001, rel=1e-3)
    scheduler.add([sequence(400, first=5)])
    mixed = scheduler.schedule()
    assert mixed
    work = LIMITS.prompt_time(0, mixed.figures[2][0][0])
    for _ in range(40):
        budget.measured(mixed, 0.012 + 4 * 0.0001 * work)
    assert budget.prompt_time() == pytest.approx(2 * (MAX_SLOWDOWN - 1) * 0.006 / (4 * 0.0001), rel=1e-3)


def test_rows_that_nobody_holds_are_no_part_of_a_step_where_they_take_no_time():
    """Two of eight generate, in 4 ms: what a step of 54 ms has beside them is of 100 tokens of a prompt."""
    budget = PrefillBudget(IDLE, replace(LIMITS, multiplies_padding=False))
    prompt, tokens = sequence(100), (0,) * 100
    works = [SequenceWork(sequence(), slot, 5, [0], ()) for slot in range(2)]
    mixed = Batch((*works, SequenceWork(prompt, 2, 0, tokens, ())))
    seconds = 0.004 + 5 * 0.0001 * LIMITS.prompt_time(0, 100)
    for _ in range(60):
        budget.measured(mixed, seconds)
    assert budget.prompt_time() == pytest.approx((MAX_SLOWDOWN - 1) * 0.006 / (5 * 0.0001), rel=1e-3)


def test_a_chunk_that_time_cuts_fills_the_program_that_it_runs_in():
    """Of the numbers of blocks that programs have, 1, 2, 4, ..., 32, the nearest to what the time is for."""

    def blocks(room: float, *prompts: int, multiplies_padding: bool = True) -> list[int]:
        """Of each prompt, in a step beside one that generates with time for so many blocks of prompts."""
        limits = replace(LIMITS, even_context=1e9, multiplies_padding=multiplies_padding)
        budget = PrefillBudget(IDLE, limits)
        budget.prompt_time = lambda: room * limits.block + 1e-3
        scheduler = budgeted(budget, limits)
        scheduler.add(generating(1))
        prefilled(scheduler, 3)
        scheduler.add([sequence(count * 16, first=5 + 9 * one) for one, count in enumerate(prompts)])
        batch = scheduler.schedule()
        assert batch
        counts = [len(work.tokens) for work in batch.works if work.is_prompt]
        assert all(count % 16 == 0 for count in counts)
        return [count // 16 for count in counts]

    assert [blocks(room, 30)[0] for room in (1, 2, 3, 4, 5, 6, 8, 11, 12)] == [1, 2, 4, 4, 4, 8, 8, 8, 16]
    assert blocks(3, 30, multiplies_padding=False) == [3]
    assert blocks(3, 3, 30) == [3, 1]  # the program of four has room for one more, whatever the time
    assert blocks(5, 5, 30) == [5, 3]
    assert blocks(5, 4, 30) == [4]
    assert blocks(3, 3) == [3]
    assert blocks(40, 30, 30) == [30, 2]
    assert blocks(5, 2, 1, 30) == [2, 1, 1]


def seconds(batch: Batch, slope: float) -> float:
    """Of a device on which attention takes `slope` times its FLOPs' time, for a token as for a block."""
    _, _, chunks, _ = batch.figures
    even = LIMITS.even_context / slope
    whole = [(-(-count // LIMITS.block) * LIMITS.block, end) for count, end in chunks]
    of_prompts = sum(count * (1 + (end - count / 2) / even) for count, end in whole)
    return (0.006 if chunks else 0.005) + 0.0001 * of_prompts


@pytest.mark.parametrize("slope", [1.0, 3.0])
def test_a_prompt_of_30k_tokens_holds_up_others_for_four_steps_or_the_shortest_time_it_can(slope):
    def served(budget: PrefillBudget | None) -> list[tuple[float, int]]:
        """(step over one without prompts, prompt tokens) of the prompt's steps."""
        scheduler = budgeted(budget)
        scheduler.add(generating(4))
        steps, prompt = list[tuple[float, int]](), sequence(30_000, max_tokens=1)
        for number in range(100_000):
            if number == 20:
                scheduler.add([prompt])
            batch = scheduler.schedule()
            assert batch
            steps += [(seconds(batch, slope) / 0.005, count) for count, _ in batch.figures[2]]
            if budget is not None:
                budget.measured(batch, seconds(batch, slope))
            run(scheduler, batch)
            if prompt.num_generated:
                return steps
        raise AssertionError("the prompt was never prefilled")

    steps, without = served(PrefillBudget(IDLE, LIMITS)), served(None)
    assert sum(count for _, count in steps) > 29_000
    assert max(count for _, count in steps) >= 2 * LIMITS.block  # as many as fit, not the fewest there are
    assert max(ratio for ratio, count in steps if count > LIMITS.block) < 4
    assert max(without)[0] > 1.5 * max(steps)[0]


def test_nobody_waits_where_nobody_generates():
    scheduler = budgeted(PrefillBudget(IdleSeconds(IDLE.generate, inf), LIMITS))
    scheduler.add([sequence(600)])
    batch = scheduler.schedule()
    assert batch and batch.num_tokens == LIMITS.chunk


def prefilled(scheduler: Scheduler, num_steps: int) -> list[tuple[int, int]]:
    """(prompt tokens, sequences that generate) of the next steps."""
    steps = list[tuple[int, int]]()
    for _ in range(num_steps):
        batch = scheduler.schedule()
        assert batch
        prompts = sum(len(work.tokens) for work in batch.works if work.is_prompt)
        steps.append((prompts, sum(not work.is_prompt for work in batch.works)))
        run(scheduler, batch)
    return steps


def test_prompts_that_come_at_once_are_all_prefilled_before_the_first_of_them_generates():
    """Of 1,136 tokens a chunk, a chunk, and the rest in as many blocks as programs have: 4, 2 and 1."""
    scheduler = budgeted(PrefillBudget(IDLE, LIMITS))
    scheduler.add([sequence(142, max_tokens=50, first=200 * one) for one in range(8)])
    steps = prefilled(scheduler, 10)
    assert sum(tokens for tokens, _ in steps) == 8 * 142
    assert [number for _, number in steps if number] == [8] * sum(not tokens for tokens, _ in steps)
    padded = [-(-tokens // LIMITS.block) for tokens, _ in steps if tokens]
    assert padded[:2] == [LIMITS.chunk // LIMITS.block] * 2 and padded[2:] == sorted(padded[2:], reverse=True)
    assert sum(padded[1:]) <= MAX_BURST_CHUNKS * LIMITS.chunk // LIMITS.block


def test_who_has_generated_waits_for_no_burst_and_nobody_for_a_longer_one():
    scheduler = budgeted(PrefillBudget(IDLE, LIMITS))
    scheduler.add(generating(1))
    prefilled(scheduler, 2)
    scheduler.add([sequence(142, max_tokens=50, first=200 * one) for one in range(1, 7)])
    assert all(number for _, number in prefilled(scheduler, 4))
    scheduler = budgeted(PrefillBudget(IDLE, LIMITS))
    scheduler.add([*generating(1), sequence((2 + MAX_BURST_CHUNKS) * LIMITS.chunk, max_tokens=2)])
    assert [number for _, number in prefilled(scheduler, 4)] == [0, 1, 1, 1]
