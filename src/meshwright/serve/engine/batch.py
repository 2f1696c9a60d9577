"""One step of the device, as data: the scheduler makes it, the runner runs it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from meshwright.serve.engine.limits import IdleSeconds, Limits
from meshwright.serve.engine.pages import NO_PAGE, Move
from meshwright.serve.engine.request import Reads, TokenScore
from meshwright.serve.engine.sequence import TokenSequence

PENDING = -1  # a token that the step before samples, and that the host has not read yet
CACHED = -1  # in place of a page that is cached already and needs no copy


class SequenceWork(NamedTuple):
    """Consecutive tokens of one sequence, whose keys and values the step computes.

    slot: of the sequence, which may have left it since. start: the position of the first token.
    tokens: ids; the first may be PENDING. pages: of the sequence, up to the last token.
    num_drafts: the number of tokens at the end that are guesses to verify.
    samples: a next token is sampled after the last token, and after each token before a draft.
    window_pages: of layers with a window, NO_PAGE for pages that no token sees.
    reads: further results, read from the hidden states.
    restored, saved: numbers of snapshots of states, NO_PAGE for none. Before the step the first is copied to
    the slot, after it the slot's states to the second. num_right: drafts of the sequence's step before that
    were right, after which the states are read.
    draft_logits: f32[V] that each draft was drawn from, for the ratio test; without them a draft is right if
    the same token is sampled.
    hidden: f32[n, D] that a draft head reads next to its tokens. position: of the first token in the
    sequence, if not `start`: sampling depends on it.
    """

    sequence: TokenSequence
    slot: int
    start: int
    tokens: Sequence[int]
    pages: tuple[int, ...]
    num_drafts: int = 0
    samples: bool = True
    window_pages: tuple[int, ...] = ()
    reads: Reads = None
    draft_logits: Sequence[np.ndarray] = ()
    hidden: np.ndarray | None = None
    position: int | None = None
    restored: int = NO_PAGE
    saved: int = NO_PAGE
    num_right: int = 0

    @property
    def drafts(self) -> Sequence[int]:
        return self.tokens[len(self.tokens) - self.num_drafts :] if self.num_drafts else ()

    @property
    def num_samples(self) -> int:
        return self.num_drafts + 1 if self.samples else 0

    @property
    def ends_request(self) -> bool:
        """Whether these are the last tokens of a request that generates nothing."""
        sequence = self.sequence
        return not sequence.request.generates and self.start + len(self.tokens) == sequence.num_prompt

    @property
    def is_prompt(self) -> bool:
        """Whether it prefills: several tokens that are not guesses."""
        return len(self.tokens) > 1 + self.num_drafts


class Batch(NamedTuple):
    """One step: one or more tokens of each of its sequences.

    num_counted: further sequences that generate, which a load test counts instead of listing them.
    counted_positions: seen by all counted sequences. moves: between cache and host pages, before the step.
    generates: whether sequences that only need their next token take part.
    """

    works: tuple[SequenceWork, ...]
    num_counted: int = 0
    counted_positions: int = 0
    moves: tuple[Move, ...] = ()
    generates: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(len(work.tokens) for work in self.works) + self.num_counted

    @property
    def figures(self) -> tuple[int, float, list[tuple[int, int]], int]:
        """The inputs of its price: (sequences that generate, their mean context, chunks, drafts).

        chunks: for each prompt its tokens in this step, and the positions up to its last.
        """
        positions, num_generating, num_drafts = self.counted_positions, self.num_counted, 0
        chunks: list[tuple[int, int]] = []
        for work in self.works:
            num_tokens = len(work.tokens)
            num_drafts += work.num_drafts
            if num_tokens > 1 + work.num_drafts:  # `is_prompt`
                chunks.append((num_tokens, work.start + num_tokens))
            else:
                positions += work.start + 1
                num_generating += 1
        return num_generating, positions / num_generating if num_generating else 0.0, chunks, num_drafts


class WorkOutput(NamedTuple):
    """The outputs of one work.

    tokens: sampled, `work.num_samples` of them. scores: of the prompt tokens after each of its tokens.
    embedding: f32[D] of its last token, L2-normalised. logits: f32[V] of each sampled token, and hidden:
    f32[n, D] of all n tokens after the final norm, of a runner that keeps them.
    """

    tokens: Sequence[TokenScore]
    scores: Sequence[TokenScore] = ()
    embedding: np.ndarray | None = None
    logits: Sequence[np.ndarray] = ()
    hidden: np.ndarray | None = None


class StepResult(Protocol):
    """The outputs of a dispatched step."""

    def read(self) -> Sequence[WorkOutput]:
        """The outputs of each work of the batch; waits for the device."""
        ...


class Runner(Protocol):
    """The model on its devices. Called from one thread at a time; steps run in the order of the calls."""

    @property
    def limits(self) -> Limits: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def embedding_size(self) -> int: ...

    @property
    def idle_seconds(self) -> IdleSeconds | None:
        """None if it has not been measured."""
        ...

    def run(self, batch: Batch) -> StepResult:
        """Dispatch one step; may return before the step ends."""
        ...

    def export(self, pages: Sequence[int], snapshot: int = NO_PAGE) -> object:
        """Dispatch a copy of the contents of `pages` and a snapshot, for another runner of the same model."""
        ...

    def accept(self, pages: Sequence[int], exported: object, snapshot: int = NO_PAGE) -> None:
        """Dispatch a write of another runner's pages to `pages`, without CACHED ones, and of its snapshot."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Move pages between cache and host; `run` makes the moves of its batch itself."""
        ...

    def prepare_reads(self) -> None:
        """Compile the programs for works with `reads`; called from any thread."""
        ...
