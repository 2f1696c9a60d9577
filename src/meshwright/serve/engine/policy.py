"""Policies of the scheduler: which sequences run in a step, and how many tokens of each. Plain Python.

A policy makes four decisions. The scheduler does the rest: slots, pages, cached prefixes, drafts.

    budget             which sequences run in the next step, and how many prompt tokens of each
    rank               the order of sequences, running or waiting
    admission_order    the order of attempts to start waiting sequences
    victim             the sequence that gives its pages back when they run out
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, get_args

from meshwright.serve.engine.batch import Batch
from meshwright.serve.engine.limits import IdleSeconds, Limits
from meshwright.serve.engine.prefill_budget import PrefillBudget
from meshwright.serve.engine.replica import Replica
from meshwright.serve.engine.sequence import TokenSequence

# Prompts that arrive with the first step's prompts are prefilled before any sequence generates, if at most
# this many chunks are left. The alternative is dozens of steps, each doubled by one block of a prompt.
MAX_BURST_CHUNKS = 2

Mode = Literal["interleaved", "batched"]
MODES: tuple[Mode, ...] = get_args(Mode)
# Two engines, one to prefill and one to generate; each is interleaved.
DISAGGREGATED = "disaggregated"


def mode_of(asked: str) -> Mode:
    """The mode of each scheduler of a server with this mode."""
    return "batched" if asked == "batched" else "interleaved"


def policy_of(mode: Mode, limits: Limits, idle: IdleSeconds | None) -> "Policy":
    """The policy of a mode. idle: measured steps; None: prompts are bounded by `limits` only."""
    if mode == "batched":
        return Batched(limits)
    return Interleaved(limits, None if idle is None else PrefillBudget(idle, limits))


class Queue(Protocol):
    """The sequences of a scheduler, running and waiting, each ordered by rank."""

    @property
    def running(self) -> Sequence[TokenSequence]: ...
    @property
    def waiting(self) -> Sequence[TokenSequence]: ...
    @property
    def num_free_slots(self) -> int: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def replicas(self) -> Sequence[Replica]: ...
    @property
    def is_generating(self) -> bool:
        """Whether a running sequence has computed its prompt and has tokens to generate."""
        ...


class StepBudget(Protocol):
    """Tokens that one step may still take.

    generates: sequences with one token left to compute may run. starts: waiting sequences may start.
    """

    generates: bool
    starts: bool

    def has_room(self, replica: Replica) -> bool:
        """Whether a waiting sequence may start on this replica."""
        ...

    def num_tokens(self, sequence: TokenSequence, replica: Replica) -> int:
        """The next tokens of `sequence` that still fit into the step; 0: it does not run."""
        ...

    def take(self, sequence: TokenSequence, replica: Replica, num_tokens: int) -> None:
        """Reserve these tokens; called before the sequence counts them as computed."""
        ...


class Policy:
    """First come, first served within a priority. Subclasses define the budget of a step."""

    def budget(self, queue: Queue) -> StepBudget:
        """The budget of the next step."""
        raise NotImplementedError

    def hold_nothing(self) -> None:
        """Called if a budget without `generates` leaves a step empty; `budget` is then asked again."""

    def rank(self, sequence: TokenSequence, num_arrived: int) -> tuple[int, int]:
        """The sort key of a sequence. num_arrived: sequences before this one."""
        return sequence.request.priority, num_arrived

    def admission_order(self, waiting: Sequence[TokenSequence]) -> Iterable[TokenSequence]:
        """The waiting sequences in the order of attempts to start them."""
        return waiting

    def victim(self, running: Sequence[TokenSequence]) -> TokenSequence:
        """The sequence that gives its pages back. running: on one replica, ordered by rank."""
        return running[-1]

    def scheduled(self, queue: Queue) -> None:
        """Called after each step has been scheduled."""

    def measured(self, batch: Batch, seconds: float) -> None:
        """Learn from the measured seconds of a step."""


class Interleaved(Policy):
    """Continuous batching: every step generates, and takes a chunk of prompts (Agrawal et al., 2023).

    prefill_budget: bounds the prompt tokens of a step that generates; None: `limits` only.
    """

    def __init__(self, limits: Limits, prefill_budget: PrefillBudget | None = None) -> None:
        self._limits, self._prefill_budget = limits, prefill_budget
        self._burst = Burst(limits)

    def budget(self, queue: Queue) -> "PromptBudget":
        if self._prefill_budget is None:
            return PromptBudget(self._limits)
        if num_blocks := self._burst.num_blocks(queue):
            return PromptBudget(self._limits, num_blocks * self._limits.block, generates=False)
        max_time = self._prefill_budget.prompt_time() if queue.is_generating else None
        return PromptBudget(self._limits, max_time=max_time)

    def hold_nothing(self) -> None:
        self._burst.end()

    def scheduled(self, queue: Queue) -> None:
        if self._prefill_budget is not None:
            self._prefill_budget.scheduled(is_waiting=bool(queue.waiting and queue.num_free_slots))

    def measured(self, batch: Batch, seconds: float) -> None:
        if self._prefill_budget is not None:
            self._prefill_budget.measured(batch, seconds)


class Batched(Policy):
    """Static batching: sequences start once all others have finished, and generate once all are prefilled."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._is_filling = limits, False

    def budget(self, queue: Queue) -> "PromptBudget":
        self._is_filling = self._is_filling or not queue.running
        return PromptBudget(self._limits, generates=not self._is_filling, starts=self._is_filling)

    def hold_nothing(self) -> None:
        self._is_filling = False


class Burst:
    """Prompts that arrive together, which are prefilled before the first of them generates."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._num_left = limits, 0  # blocks that may still be taken

    def num_blocks(self, queue: Queue) -> int:
        """Blocks of each replica in the next step, while sequences that could generate wait; 0: they go on.

        At most the blocks that are there, rounded down to the size of a program.
        """
        limits = self._limits
        if not queue.is_generating:
            self._num_left = MAX_BURST_CHUNKS * (limits.chunk // limits.block)
            return 0
        if not self._num_left:
            return 0
        prompts = (*queue.running, *queue.waiting[: queue.num_free_slots])
        blocks = sum(-(-one.num_uncomputed // limits.block) for one in prompts if one.num_uncomputed > 1)
        per_replica = -(-blocks // limits.num_replicas)
        if not 0 < per_replica <= self._num_left:
            self.end()
            return 0
        taken = max(size for size in limits.block_counts if size <= per_replica)
        self._num_left -= taken
        return taken

    def end(self) -> None:
        self._num_left = 0


class PromptBudget:
    """A StepBudget of whole blocks of prompts; a token of a sequence that generates always fits.

    max_tokens: prompt tokens of a replica. max_time: of prompt tokens, in the unit of `Limits.prompt_time`.
    """

    __slots__ = ("_limits", "_max_time", "_max_tokens", "_time", "_tokens", "generates", "starts")

    def __init__(
        self,
        limits: Limits,
        max_tokens: int | None = None,
        *,
        max_time: float | None = None,
        generates: bool = True,
        starts: bool = True,
    ) -> None:
        self._limits, self._max_tokens = limits, max_tokens or limits.chunk
        longest = limits.max_prompt_time
        self._max_time = longest if max_time is None else min(longest, max_time)
        self.generates, self.starts = generates, starts
        self._tokens: dict[Replica, int] = {}  # taken so far, filled up to whole blocks
        self._time: dict[Replica, float] = {}

    def has_room(self, replica: Replica) -> bool:
        return self._tokens.get(replica, 0) < self._max_tokens

    def num_tokens(self, sequence: TokenSequence, replica: Replica) -> int:
        """At least a block of the first prompt, even if its time exceeds the maximum.

        Far from the beginning of a prompt fewer tokens save little: all earlier positions are read for one
        token as for a block. A prompt that is cut for time fills the program of the step.
        """
        wanted = sequence.num_uncomputed
        if wanted <= 1:
            return wanted
        limits, block, start = self._limits, self._limits.block, sequence.num_computed
        taken = self._tokens.get(replica, 0)
        whole = count = -(-min(self._max_tokens - taken, wanted) // block) * block
        time_left = self._max_time - self._time.get(replica, 0.0)
        while count > 0 and limits.prompt_time(start, count) > time_left:
            count -= block
        if count < whole and limits.multiplies_padding and start + count < limits.even_context:
            count = min(whole, self._filled_up(taken, count))
        if count <= 0 and not taken:
            count = block
        return max(0, min(count, wanted))

    def _filled_up(self, taken: int, count: int) -> int:
        """Tokens of a prompt, about `count`, that fill the program of the step.

        The program is the nearest to the time, or the smallest for the tokens taken so far. One more block
        would need the next program, of twice the size; one less would not save time.
        """
        block, sizes = self._limits.block, self._limits.block_counts
        used = taken // block
        wanted = used + count // block
        place = bisect_left(sizes, wanted)
        larger, smaller = sizes[place], sizes[max(place - 1, 0)]
        nearest = larger if larger * smaller <= wanted * wanted else smaller
        return (max(nearest, sizes[bisect_left(sizes, used)]) - used) * block

    def take(self, sequence: TokenSequence, replica: Replica, num_tokens: int) -> None:
        if num_tokens > 1:
            block, start = self._limits.block, sequence.num_computed
            whole = -(-num_tokens // block) * block
            self._tokens[replica] = self._tokens.get(replica, 0) + whole
            self._time[replica] = self._time.get(replica, 0.0) + self._limits.prompt_time(start, whole)
