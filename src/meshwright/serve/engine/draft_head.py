"""Drafts by a head of the model itself (EAGLE, multi-token prediction). Plain Python.

The head reads the hidden state of position i and token i + 1, and guesses token i + 2. After n tokens the
model has hidden states of positions 0..n-2. From them the head computes its cache entries of these
positions, and its last entry yields the first guess. Further guesses read the head's own hidden state
instead; their entries are overwritten once the model has computed the positions.

Sources: Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"; DeepSeek-AI
2024, "DeepSeek-V3", section 2.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import ref

import numpy as np

from meshwright.serve.engine.batch import Batch, Runner, SequenceWork, WorkOutput
from meshwright.serve.engine.sequence import TokenSequence
from meshwright.serve.engine.speculate import Drafter, Payoff, pages_of_slot, without_edits


class HeadDrafter(Drafter):
    """Guesses by the head of the model, for all sequences of a step together.

    runner: of the head, with the slots and the context of the engine's, whole contexts for each slot, and
    `num_drafts`; its steps return hidden states, and logits if by_ratio. num_drafts, cost_ratio: of Payoff.
    """

    def __init__(
        self, runner: Runner, num_drafts: int, cost_ratio: Callable[[int], float], *, by_ratio: bool = False
    ) -> None:
        super().__init__(Payoff(num_drafts, cost_ratio))
        self._runner, self._num_drafts, self._by_ratio = runner, num_drafts, by_ratio
        self._heads: dict[int, _Entries] = {}

    def computed(self, work: SequenceWork, hidden: np.ndarray) -> None:
        entries = self._heads.get(work.slot)
        if entries is None or entries.sequence() is not work.sequence:
            entries = self._heads[work.slot] = _Entries(ref(work.sequence), work.start)
        entries.add(work.start, hidden)

    def draft(self, sequence: TokenSequence) -> list[int]:
        assert sequence.slot is not None
        entries = self._heads.get(sequence.slot)
        return entries.guesses if entries is not None and entries.sequence() is sequence else []

    def logits(self, sequence: TokenSequence) -> Sequence[np.ndarray]:
        assert sequence.slot is not None
        return self._heads[sequence.slot].logits if self._by_ratio else ()

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        ready: list[_Asked] = []
        for sequence in sequences:
            entries = self._heads.get(sequence.slot if sequence.slot is not None else -1)
            if entries is None or entries.sequence() is not sequence:
                continue
            entries.guesses, entries.logits = [], []
            count = min(self._num_drafts, self._runner.limits.context - len(sequence.tokens))
            if count > 0 and entries.knows(len(sequence.tokens) - 1):
                ready.append(_Asked(sequence, entries, without_edits(sequence), count))
        for asked in ready:
            self._catch_up(asked)
        step = [asked.missing(self._runner) for asked in ready]
        while step:
            outputs = self._runner.run(Batch(tuple(step))).read()
            for asked, output in zip(ready, outputs, strict=True):
                asked.take(output)
            ready = [asked for asked in ready if len(asked.entries.guesses) < asked.count]
            step = [asked.next(self._runner) for asked in ready]

    def _catch_up(self, asked: "_Asked") -> None:
        """Compute entries until a step that verifies drafts has rows for the rest."""
        limits = self._runner.limits
        while (num_more := len(asked.entries.waiting) - 1 - self._num_drafts) > 0:
            count = min(num_more, limits.chunk)
            work = asked.work(self._runner, asked.entries.num_done, asked.entries.waiting[:count])
            self._runner.run(Batch((work._replace(samples=False),))).read()
            asked.entries.forget(count)


@dataclass
class _Entries:
    """The entries of one sequence in the head's cache, and hidden states for the next ones.

    first: the position of the first entry; earlier ones are of a cached prefix, or were computed elsewhere.
    num_done: entries in the cache. waiting: hidden states [D] of the positions after these. guesses, logits:
    the last ones.
    """

    sequence: "ref[TokenSequence]"
    first: int
    num_done: int = 0
    waiting: list[np.ndarray] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)

    def add(self, start: int, hidden: np.ndarray) -> None:
        """Note the hidden states [n, D] from position `start` on; they replace earlier ones."""
        known = start - self.first - self.num_done
        if not 0 <= known <= len(self.waiting):  # a preempted sequence begins again
            self.first, self.num_done, known = start, 0, 0
        self.waiting = [*self.waiting[:known], *hidden]

    def knows(self, num_positions: int) -> bool:
        """Whether the hidden states of the first positions are known; refused guesses are dropped."""
        del self.waiting[max(num_positions - self.first - self.num_done, 0) :]
        return bool(self.waiting) and self.first + self.num_done + len(self.waiting) == num_positions

    def forget(self, count: int) -> None:
        """Drop hidden states whose entries are in the cache now."""
        self.num_done += count
        del self.waiting[:count]


@dataclass
class _Asked:
    """A sequence that needs `count` guesses. hidden: the head's own, of the last guess."""

    sequence: TokenSequence
    entries: _Entries
    asked: TokenSequence
    count: int
    hidden: np.ndarray | None = None

    def work(
        self, runner: Runner, number: int, hidden: Sequence[np.ndarray], tokens: Sequence[int] = ()
    ) -> SequenceWork:
        """Entries from `number` on, of these hidden states. tokens: after them, by default the sequence's."""
        assert self.sequence.slot is not None
        position = self.entries.first + number + 1  # of the first token
        return SequenceWork(
            self.asked,
            self.sequence.slot,
            number,
            tokens or self.sequence.tokens[position : position + len(hidden)],
            pages_of_slot(runner.limits, self.sequence.slot),
            position=position,
            hidden=np.stack(hidden),
        )

    def missing(self, runner: Runner) -> SequenceWork:
        """The last entries of the model's hidden states; the head samples after each, as if verifying."""
        entries = self.entries
        work = self.work(runner, entries.num_done, entries.waiting)
        entries.forget(len(work.tokens))
        return work._replace(num_drafts=len(work.tokens) - 1)

    def next(self, runner: Runner) -> SequenceWork:
        """The entry of the last guess."""
        assert self.hidden is not None
        number, guess = self.entries.num_done + len(self.entries.guesses) - 1, self.entries.guesses[-1]
        return self.work(runner, number, [self.hidden], [guess])

    def take(self, output: WorkOutput) -> None:
        """Take the last sampled token as a guess."""
        assert output.hidden is not None, "the head's runner keeps hidden states"
        self.entries.guesses.append(output.tokens[-1].token)
        self.entries.logits += output.logits[-1:]
        self.hidden = output.hidden[-1]
