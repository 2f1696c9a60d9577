"""The entries that a draft head computes, with a runner whose guesses count up."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from meshwright.serve.engine.batch import Batch, SequenceWork, WorkOutput
from meshwright.serve.engine.draft_head import HeadDrafter
from meshwright.serve.engine.request import GREEDY, Request, TokenScore
from meshwright.serve.engine.sequence import TokenSequence


class _Head:
    """Guesses the next number; its hidden state is minus the token. Keeps the works of each step."""

    def __init__(self) -> None:
        self.limits: Any = SimpleNamespace(
            context=32, pages_per_context=4, slots_per_replica=2, chunk=4, page_size=8
        )
        self.steps: list[tuple[SequenceWork, ...]] = []

    def run(self, batch: Batch) -> "_Head":
        self.steps.append(batch.works)
        return self

    def read(self) -> Sequence[WorkOutput]:
        return [
            WorkOutput(
                [TokenScore(token + 1, 0.0, ()) for token in work.tokens],
                # Of each sampled token, as a runner that keeps logits returns them.
                logits=[np.full(3, token + 1, np.float32) for token in work.tokens],
                hidden=-np.asarray(work.tokens, np.float32)[:, None],
            )
            for work in self.steps[-1]
        ]

    def entries(self) -> list[list[tuple[int, list[int], list[float], int | None]]]:
        """Start, tokens, hidden states and position of each work, by steps."""
        return [
            [
                (work.start, list(work.tokens), [float(x) for x in work.hidden[:, 0]], work.position)
                for work in step
                if work.hidden is not None
            ]
            for step in self.steps
        ]


def _sequence(tokens: Sequence[int], slot: int) -> TokenSequence:
    sequence = TokenSequence(Request(tuple(tokens), 20, GREEDY), 20, 0, lambda _: None)
    sequence.slot = slot
    return sequence


def _computed(drafter: HeadDrafter, sequence: TokenSequence, start: int, count: int) -> None:
    """The model has computed positions, whose hidden states are their numbers."""
    assert sequence.slot is not None
    work = SequenceWork(sequence, sequence.slot, start, [0] * count, ())
    drafter.computed(work, np.arange(start, start + count, dtype=np.float32)[:, None])


def test_entries_read_the_state_of_a_position_and_the_token_after_it() -> None:
    head = _Head()
    drafter = HeadDrafter(head, 2, lambda _: 0.5)  # pyright: ignore[reportArgumentType]
    one, two = _sequence([10, 11, 12, 13], 0), _sequence([20, 21], 1)
    _computed(drafter, one, 0, 3)
    _computed(drafter, two, 0, 1)
    drafter.prepare([one, two])
    assert (drafter.draft(one), drafter.draft(two)) == ([14, 15], [22, 23])
    # Both sequences in each step; the second guess reads the head's own state, at the next entry.
    assert head.entries() == [
        [(0, [11, 12, 13], [0, 1, 2], 1), (0, [21], [0], 1)],
        [(3, [14], [-13], 4), (1, [22], [-21], 2)],
    ]
    # The first guess was right, the second was not: the entry of the first is computed again.
    for token in (14, 99):
        one.tokens.append(token)
    _computed(drafter, one, 3, 3)  # the last state is of the refused guess
    head.steps.clear()
    drafter.prepare([one])
    assert drafter.draft(one) == [100, 101]
    assert head.entries()[0] == [(3, [14, 99], [3, 4], 4)]


def test_a_long_prompt_is_computed_in_chunks_and_a_cached_prefix_is_left_out() -> None:
    head = _Head()
    drafter = HeadDrafter(head, 2, lambda _: 0.5)  # pyright: ignore[reportArgumentType]
    one = _sequence(range(10, 26), 0)
    assert drafter.draft(one) == []  # nothing was computed here yet
    _computed(drafter, one, 4, 11)
    drafter.prepare([one])
    assert drafter.draft(one) == [26, 27]
    starts = [(work.start, len(work.tokens), work.position) for [work] in head.steps]
    assert starts == [(0, 4, 5), (4, 4, 9), (8, 3, 13), (11, 1, 16)]
    # A preempted sequence is computed from the beginning.
    _computed(drafter, one, 0, 15)
    head.steps.clear()
    drafter.prepare([one])
    [first] = head.steps[0]
    assert (first.start, first.position) == (0, 1)
    assert drafter.draft(one) == [26, 27]


def test_each_guess_has_the_logits_that_it_was_drawn_from() -> None:
    """For the ratio test; none without it."""
    one = _sequence([10, 11, 12, 13], 0)
    for by_ratio in (True, False):
        drafter = HeadDrafter(_Head(), 3, lambda _: 0.5, by_ratio=by_ratio)  # pyright: ignore[reportArgumentType]
        _computed(drafter, one, 0, 3)
        drafter.prepare([one])
        guesses = drafter.draft(one)
        assert guesses == [14, 15, 16]
        assert [each[0] for each in drafter.logits(one)] == (guesses if by_ratio else [])
