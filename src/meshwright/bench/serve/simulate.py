"""A load test of a server that is only planned: the engine's own scheduler, on a clock that prices move on.

Each replica has a scheduler and a device. As in the engine, the next step is scheduled when one begins,
before its tokens are known, and begins when it ends. Hosts, tokenizers and networks to clients take no time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

import numpy as np

from meshwright.bench.serve.client import Answer
from meshwright.bench.serve.drive import Load
from meshwright.bench.serve.traffic import Turn
from meshwright.errors import RequestError
from meshwright.serve.batch import Batch, Limits, Work
from meshwright.serve.scheduler import Mode, Scheduler
from meshwright.serve.sequence import Event, Request, TokenScore
from meshwright.serve.sequence import Sequence as Answering

# A queue as long as anyone likes: clients wait, none is turned away.
_ENDLESS = 1 << 60


class StepPrices(Protocol):
    """What a step takes, in seconds; `plan.serve.steps.StepSeconds`."""

    def seconds(
        self, num_sequences: int, mean_context: float, chunks: Sequence[tuple[int, int]], num_drafts: int
    ) -> float: ...


@dataclass(frozen=True)
class Planned:
    """A server: its engines, and what their steps take.

    replicas: that answer. prefill_replicas: that prefill for them, 0 where each does both; a prompt's keys
    and values then take `transfer_seconds` a token to the replica that answers. num_drafts: guesses of a
    sequence a step, each right with probability `acceptance` where those before it are.
    """

    limits: Limits
    prices: StepPrices
    mode: Mode = "interleaved"
    prefix_cache: bool = True
    replicas: int = 1
    prefill_replicas: int = 0
    transfer_seconds: float = 0.0
    num_drafts: int = 0
    acceptance: float = 0.0


@dataclass(frozen=True)
class Used:
    """What became of the pages and the drafts of all replicas.

    cached_tokens: of prompts, found in pages that were there. busy_seconds: of the devices, all together.
    """

    steps: int
    prompt_tokens: int
    cached_tokens: int
    preempted: int
    busy_seconds: float


def simulate(planned: Planned, load: Load) -> tuple[list[Answer], Used]:
    """The answers to every turn of `load`, in the order of their chats, and what the replicas did.

    A chat stays with one replica, that with the fewest sequences when it begins; turns follow each other at
    once. Raises RequestError for a prompt and an answer longer than the context.
    """
    return _Simulation(planned, load).run()


class _Simulation:
    def __init__(self, planned: Planned, load: Load) -> None:
        self.now = 0.0
        self._load = load
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial, self._tokens = count(), count(1)
        self._prefix = [next(self._tokens) for _ in range(load.prefix_tokens)]
        self._pools = [_Replica(self, planned, number) for number in range(planned.replicas)]
        self._prefilling = [
            _Replica(self, planned, planned.replicas + number) for number in range(planned.prefill_replicas)
        ]
        self._planned = planned
        self._waiting: list[int] = []
        self._under_way = 0
        self._answers: list[list[Answer]] = [[] for _ in load.chats]

    def run(self) -> tuple[list[Answer], Used]:
        for number, chat in enumerate(self._load.chats):
            self.at(chat.arrival_seconds, partial(self._arrive, number))
        while self._events:
            self.now, _, happen = heappop(self._events)
            happen()
        replicas = [*self._pools, *self._prefilling]
        used = Used(
            sum(one.steps for one in replicas),
            sum(one.prompt_tokens for one in replicas),
            sum(one.cached_tokens for one in replicas),
            sum(one.preempted for one in replicas),
            sum(one.busy_seconds for one in replicas),
        )
        return [answer for answers in self._answers for answer in answers], used

    def at(self, seconds: float, happen: Callable[[], None]) -> None:
        """Has something happen at a time; of one time, in the order of the calls."""
        heappush(self._events, (seconds, next(self._serial), happen))

    def new_token(self) -> int:
        """A token that no text has had yet."""
        return next(self._tokens)

    def _arrive(self, number: int) -> None:
        limit = self._load.concurrency
        if limit is not None and self._under_way >= limit:
            self._waiting.append(number)
            return
        self._under_way += 1
        replica = min(self._pools, key=lambda one: one.num_unfinished)
        self._ask(number, replica, list(self._load.chats[number].turns), list(self._prefix))

    def _ask(self, number: int, replica: "_Replica", turns: list[Turn], said: list[int]) -> None:
        """Asks for the next turn of a chat, and for the one after it once it is answered."""
        turn, answer = turns[0], Answer(self.now)
        self._answers[number].append(answer)
        prompt = said + [self.new_token() for _ in range(turn.prompt_tokens)]
        answer.prompt_tokens = len(prompt)

        def heard(tokens: list[int]) -> None:
            answer.end_seconds, answer.num_tokens = self.now, len(tokens)
            if len(turns) > 1:
                self._ask(number, replica, turns[1:], prompt + tokens)
            else:
                self._under_way -= 1
                if self._waiting:
                    self._arrive(self._waiting.pop(0))

        asked = _Asked(prompt, turn.output_tokens, answer, heard)
        if self._prefilling:
            first = min(self._prefilling, key=lambda one: one.num_unfinished)
            first.add(asked, only_first=True, then=partial(self._hand_over, asked, replica))
        else:
            replica.add(asked)

    def _hand_over(self, asked: "_Asked", replica: "_Replica") -> None:
        """Moves a prefilled prompt to the replica that answers."""
        if len(asked.tokens) >= asked.max_tokens:
            asked.heard(asked.tokens)
            return
        seconds = self._planned.transfer_seconds * len(asked.prompt)
        self.at(self.now + seconds, lambda: replica.take_over(asked))


@dataclass
class _Asked:
    """A turn on its way. heard: called with the tokens of the whole answer."""

    prompt: list[int]
    max_tokens: int
    answer: Answer
    heard: Callable[[list[int]], None]
    tokens: list[int] = field(default_factory=list)


class _Drafts:
    """Guesses of tokens that come true with a probability."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def pays(self, num_sequences: int) -> bool:
        return True

    def draft(self, sequence: Answering) -> list[int]:
        return [-2 - place for place in range(self._num_drafts)]

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Nothing is learned: the probability is given."""


class _Replica:
    """A scheduler and its device."""

    def __init__(self, simulation: _Simulation, planned: Planned, number: int) -> None:
        self._simulation, self._planned = simulation, planned
        drafter = _Drafts(planned.num_drafts) if planned.num_drafts else None
        self._scheduler = Scheduler(
            planned.limits, _ENDLESS, mode=planned.mode, prefix_cache=planned.prefix_cache, drafter=drafter
        )
        self._random = np.random.default_rng([number, planned.num_drafts])
        self._running: Batch | None = None
        self._next: Batch | None = None
        self._coming: list[_Asked] = []  # prefilled elsewhere, without pages here yet
        self.steps = self.prompt_tokens = self.cached_tokens = self.preempted = 0
        self.busy_seconds = 0.0

    @property
    def num_unfinished(self) -> int:
        return len(self._scheduler.unfinished) + len(self._coming)

    def add(self, asked: _Asked, *, only_first: bool = False, then: Callable[[], None] | None = None) -> None:
        """Queues a turn. only_first: its first token, and `then` what follows."""
        max_tokens = 1 if only_first else asked.max_tokens - len(asked.tokens)
        prompt = (*asked.prompt, *asked.tokens)
        if len(prompt) + max_tokens > self._planned.limits.context:
            context = self._planned.limits.context
            raise RequestError(
                f"a prompt of {len(prompt):,} tokens and an answer of {max_tokens:,} make "
                f"{len(prompt) + max_tokens:,}, but the plan's context holds {context:,}",
                param="prompt",
            )

        def emit(event: Event | Exception) -> None:
            assert isinstance(event, Event)
            asked.answer.piece_seconds.append(self._simulation.now)
            asked.tokens.append(event.token)
            if event.finish_reason:
                self._finished(sequence)
                then() if then else asked.heard(asked.tokens)

        sequence = Answering(Request(prompt, max_tokens), max_tokens, 0, emit)
        self._scheduler.add([sequence])
        self._wake()

    def take_over(self, asked: _Asked) -> None:
        """Answers a turn whose first token, and pages, come from elsewhere."""
        self._coming.append(asked)
        self._admit_coming()

    def _admit_coming(self) -> None:
        """Gives pages to what was prefilled elsewhere: whole ones; the rest of a prompt is computed here."""
        [replica] = self._scheduler.replicas
        while self._coming and replica.keep_copied(self._coming[0].prompt) is not None:
            self.add(self._coming.pop(0))

    def _wake(self) -> None:
        if self._running is None:
            self._begin(self._scheduler.schedule())

    def _begin(self, batch: Batch | None) -> None:
        """Starts a step, and schedules the one behind it."""
        self._running = batch
        if batch is None:
            return
        seconds = self._seconds(batch)
        self.steps, self.busy_seconds = self.steps + 1, self.busy_seconds + seconds
        self._simulation.at(self._simulation.now + seconds, self._end)
        self._next = self._scheduler.schedule()

    def _end(self) -> None:
        batch = self._running
        assert batch is not None
        for work in batch.works:
            if work.samples:
                self._deliver(work)
        # Nothing could be scheduled before these tokens were known, or nothing was there.
        following, self._next = self._next, None
        self._admit_coming()
        self._begin(following or self._scheduler.schedule())

    def _deliver(self, work: Work) -> None:
        """Hands the sequence of one work its tokens."""
        sequence = work.sequence
        for score in self._scheduler.delivered(work, self._sampled(work)):
            event = sequence.append(score)
            if event.finish_reason:
                self._scheduler.release(sequence, event.finish_reason)
            sequence.emit(event)

    def _sampled(self, work: Work) -> list[TokenScore]:
        drafts = work.tokens[len(work.tokens) - work.num_drafts :]
        found = []
        for draft in drafts:
            if self._random.random() >= self._planned.acceptance:
                break
            found.append(TokenScore(draft, 0.0))
        rest = work.num_samples - len(found)
        return found + [TokenScore(self._simulation.new_token(), 0.0) for _ in range(rest)]

    def _seconds(self, batch: Batch) -> float:
        return self._planned.prices.seconds(*batch.figures)

    def _finished(self, sequence: Answering) -> None:
        self.prompt_tokens += len(sequence.request.prompt)
        self.cached_tokens += sequence.num_cached
        self.preempted += sequence.num_preempted
