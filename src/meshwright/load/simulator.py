"""A simulated load test of a planned server: the engine's scheduler, with predicted step times.

Each replica has a scheduler and a device. As in the engine, a step is scheduled when the previous step
begins, before the tokens of that step are known. Networks to clients take no time. A host takes time only if
it is also the device (a CPU), as calibrated: it receives requests one at a time, and shares a core with a
step that runs at the same time.

Texts have only lengths, and sequences that generate are counted together (`load/counted.py`). Steps of a
replica in which nothing joins, leaves or needs a page are a block: their seconds are an array, and one event
ends them all. A request for the replica cuts its block at the step that runs, and other replicas' blocks go
on, with the same result as step by step. The time of a simulation depends on requests, and hardly on steps
or tokens.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from operator import attrgetter
from typing import Protocol

import numpy as np

from meshwright.collector import collector_paused
from meshwright.errors import RequestError
from meshwright.load.counted import CountedRunning, CountedText, counted_tokens
from meshwright.load.timed_answer import TimedAnswer
from meshwright.load.traffic import Load, Turn
from meshwright.serve.engine.batch import Batch, SequenceWork
from meshwright.serve.engine.limits import IdleSeconds, Limits
from meshwright.serve.engine.policy import Mode, Policy, policy_of
from meshwright.serve.engine.request import Event, Request, TokenScore
from meshwright.serve.engine.scheduler import Scheduler
from meshwright.serve.engine.sequence import TokenSequence
from meshwright.serve.engine.speculate import Drafter

# The queue has no limit: clients wait, and no request is refused.
_ENDLESS = 1 << 60
# A sampled token that is not an accepted draft; its id does not matter.
_TOKEN = TokenScore(0, 0.0)
# In place of a replica's number, for events that belong to none, such as arrivals.
_NO_REPLICA = -1
# The place of an event in the order of events: its time, the time when it became sure (the end of a step is
# sure when the step starts), and its replica's number.
_Moment = tuple[float, float, int]


def _ignore(event: Event | Exception) -> None:
    """Do nothing: `_Replica._deliver` and `CountedRunning` record the tokens."""


class StepPrices(Protocol):
    """Seconds of steps; implemented by `plan.serve.steps.StepSeconds`."""

    def seconds(
        self, num_sequences: int, mean_context: float, chunks: Sequence[tuple[int, int]], num_drafts: int
    ) -> float: ...

    def generating(self, num_sequences: int, mean_contexts: np.ndarray) -> np.ndarray:
        """Seconds of a decode step for each of `mean_contexts`."""
        return np.array(
            [self.seconds(num_sequences, context, (), 0) for context in mean_contexts.tolist()], float
        )


@dataclass(frozen=True)
class Planned:
    """A planned server: its engines and the seconds of their steps.

    replicas: engines that answer. prefill_replicas: engines that only prefill, 0 if each engine does both;
    moving a prompt's keys and values to the replica that answers takes `transfer_seconds` per token.
    num_drafts: draft tokens of a sequence in a step. acceptance: probability that a draft token is accepted
    if the previous ones are. counted: count sequences that generate without drafts together, which is
    faster, with equal results. idle: the runner's steps on an idle machine, for the prefill budget; None: no
    budget. request_seconds: host time of a request before it is queued, if the host is the device;
    otherwise 0. policy: makes the policy of a scheduler from its limits; None: `mode`'s. prefill: limits and
    prices of the engines that only prefill, if theirs differ. in_turn: a replica is chosen in turn (round
    robin), not as the one with the fewest sequences.
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
    counted: bool = True
    idle: IdleSeconds | None = None
    request_seconds: float = 0.0
    policy: Callable[[Limits], Policy] | None = None
    prefill: "Planned | None" = None
    in_turn: bool = False


@dataclass(frozen=True)
class Used:
    """Totals of all replicas.

    cached_tokens: prompt tokens found in cached pages. busy_seconds: sum over the devices.
    """

    steps: int
    prompt_tokens: int
    cached_tokens: int
    preempted: int
    busy_seconds: float


def simulate_server(planned: Planned, load: Load) -> tuple[list[TimedAnswer], Used]:
    """The answers to all turns, in the order of their chats, and totals of the replicas.

    A chat stays with one replica: with the fewest sequences when the chat begins, or the next in turn. A turn
    is sent when the previous one is answered. Raises RequestError if a prompt and its answer exceed the
    context.
    """
    with collector_paused():
        return _Simulation(planned, load).run()


def _arrival(seconds: float) -> _Moment:
    """The moment of an arrival, before all other events of its time."""
    return seconds, -inf, _NO_REPLICA


class _Simulation:
    def __init__(self, planned: Planned, load: Load) -> None:
        self.now = 0.0
        self._planned, self._load = planned, load
        # The three numbers of a `_Moment`, a serial number, and the function that the event calls.
        self._events: list[tuple[float, float, int, int, Callable[[], None]]] = []
        self.moment = _arrival(0.0)
        self._serial = count()
        if not _finds_pages(planned, load):
            planned = replace(planned, prefix_cache=False)
        self._pools = [_Replica(self, planned, number) for number in range(planned.replicas)]
        self._prefilling = [
            _Replica(self, planned.prefill or planned, planned.replicas + number, prefills=True)
            for number in range(planned.prefill_replicas)
        ]
        self._waiting: deque[int] = deque()
        self._under_way, self._next_arrival = 0, inf
        self._asked: list[list[_Asked]] = [[] for _ in load.chats]

    def run(self) -> tuple[list[TimedAnswer], Used]:
        chats, events = self._load.chats, self._events
        # The next chat is last. At equal times, arrivals precede other events.
        arrivals = sorted(range(len(chats)), key=lambda number: (-chats[number].arrival_seconds, -number))
        self._next_arrival = chats[arrivals[-1]].arrival_seconds if arrivals else inf
        while arrivals or events:
            if arrivals and (not events or self._next_arrival <= events[0][0]):
                number, self.now = arrivals.pop(), self._next_arrival
                self._next_arrival = chats[arrivals[-1]].arrival_seconds if arrivals else inf
                self.moment = _arrival(self.now)
                self._arrive(number)
            else:
                self.now, since, number, _, happen = heappop(events)
                self.moment = self.now, since, number
                happen()
        replicas = [*self._pools, *self._prefilling]
        used = Used(
            sum(replica.steps for replica in replicas),
            sum(replica.prompt_tokens for replica in replicas),
            sum(replica.cached_tokens for replica in replicas),
            sum(replica.preempted for replica in replicas),
            sum(replica.busy_seconds for replica in replicas),
        )
        return [asked.timed() for turns in self._asked for asked in turns], used

    def at(
        self,
        seconds: float,
        happen: Callable[[], None],
        since: float | None = None,
        replica: int = _NO_REPLICA,
    ) -> None:
        """Schedule an event.

        since: the time when it became sure, by default now. replica: number of the replica of the step that
        ends. Events of the same time happen in the order of `since`, then of their replicas' numbers.
        """
        sure = self.now if since is None else since
        heappush(self._events, (seconds, sure, replica, next(self._serial), happen))

    def _arrive(self, number: int) -> None:
        limit = self._load.concurrency
        if limit is not None and self._under_way >= limit:
            self._waiting.append(number)
            return
        self._under_way += 1
        replica = self._chosen(self._pools, attrgetter("num_chats"))
        replica.num_chats += 1
        self._ask(number, replica, 0, CountedText(number, self._load.prefix_tokens, self._load.prefix_tokens))

    def _ask(self, number: int, replica: "_Replica", turn_number: int, history: CountedText) -> None:
        """Send a turn of a chat, after the tokens of `history`."""
        turn = self._turns(number)[turn_number]
        prompt = history.of_length(len(history) + turn.prompt_tokens)
        answer = TimedAnswer(self.now, prompt_tokens=len(prompt))
        asked = _Asked(number, turn_number, replica, prompt, turn.output_tokens, answer)
        self._asked[number].append(asked)
        if self._prefilling:
            replica = self._chosen(self._prefilling, _Replica.num_unfinished)
        replica.hear(asked)

    def _chosen(self, replicas: "list[_Replica]", load: "Callable[[_Replica], int]") -> "_Replica":
        """The replica of a new request: with the smallest `load`, or the next in turn."""
        if len(replicas) == 1:
            return replicas[0]
        if not self._planned.in_turn:
            return min(replicas, key=load)
        replica = replicas.pop(0)
        replicas.append(replica)
        return replica

    def heard(self, asked: "_Asked") -> None:
        """End a turn, and send the next of its chat, or begin a chat that waits."""
        asked.answer.end_seconds = self.now
        following = asked.turn + 1
        if following < len(self._turns(asked.chat)):
            history = asked.prompt.of_length(len(asked.prompt) + asked.num_tokens)
            self._ask(asked.chat, asked.replica, following, history)
            return
        self._under_way -= 1
        asked.replica.num_chats -= 1
        if self.now >= self._load.until_seconds:
            return
        if not self._waiting and self._load.repeats:
            self._waiting.append(len(self._asked))
            self._asked.append([])
        if self._waiting:
            self._arrive(self._waiting.popleft())

    def _turns(self, number: int) -> Sequence[Turn]:
        """The turns of a chat; a load that ends by time repeats its chats."""
        return self._load.chats[number % len(self._load.chats)].turns

    def prefilled(self, asked: "_Asked") -> None:
        """Move a prefilled prompt to the replica that answers."""
        if asked.num_tokens >= asked.max_tokens:
            self.heard(asked)
            return
        seconds = self._planned.transfer_seconds * len(asked.prompt)
        self.at(self.now + seconds, partial(asked.replica.take_over, asked))


def _finds_pages(planned: Planned, load: Load) -> bool:
    """Whether a cached page can be used again.

    It cannot if prompts share no prefix and no sequence can lose its pages, since each slot has the pages
    of a whole context.
    """
    limits = planned.limits
    shares = load.prefix_tokens >= limits.page_size or any(len(chat.turns) > 1 for chat in load.chats)
    scarce = limits.num_pages < limits.slots_per_replica * limits.pages_per_context
    return shares or scarce or bool(planned.prefill_replicas) or limits.window is not None


@dataclass(frozen=True, slots=True)
class _Block:
    """Steps that generate for the sequences of `batch`.

    start: of the first step. seconds, ends: of each step.
    """

    batch: Batch
    start: float
    seconds: np.ndarray
    ends: np.ndarray

    def start_of(self, number: int) -> float:
        """When a step of the block starts."""
        return float(self.ends[number - 1]) if number else self.start

    def num_ended(self, moment: _Moment, replica: int) -> int:
        """The steps that ended before a moment; the last of the block runs."""
        number, last = int(np.searchsorted(self.ends, moment[0])), len(self.ends) - 1
        while number < last and (float(self.ends[number]), self.start_of(number), replica) < moment:
            number += 1
        return min(number, last)


@dataclass(slots=True)
class _Asked:
    """A turn that is being answered: the numbers of its chat and turn, and the replica that answers.

    tokens: the answer's tokens, as (ends of steps, number of the first step, number after the last step).
    """

    chat: int
    turn: int
    replica: "_Replica"
    prompt: CountedText
    max_tokens: int
    answer: TimedAnswer
    num_tokens: int = 0
    tokens: "list[tuple[_StepEnds, int, int]]" = field(default_factory=list)

    def take(self, ends: "_StepEnds", first: int, stop: int) -> None:
        """Add the tokens at the ends of steps `first` to `stop` - 1."""
        self.num_tokens += stop - first
        if self.tokens and self.tokens[-1][0] is ends and self.tokens[-1][2] == first:
            first = self.tokens.pop()[1]
        self.tokens.append((ends, first, stop))

    def timed(self) -> TimedAnswer:
        """The answer with the times of its tokens, once all replicas have stopped."""
        parts = [ends.as_array[first:stop] for ends, first, stop in self.tokens]
        self.answer.piece_seconds = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self.answer.num_tokens = self.num_tokens
        return self.answer


class _StepEnds:
    """The times when steps ended."""

    def __init__(self, times: "array[float] | None" = None) -> None:
        self.times = array("d", times or ())

    @cached_property
    def as_array(self) -> np.ndarray:
        """The times as an array, once the replica has stopped."""
        return np.frombuffer(self.times)


class _Drafts(Drafter):
    """Draft tokens without text."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__()
        self._num_drafts = num_drafts

    def pays(self, num_sequences: int) -> bool:
        return True

    def draft(self, sequence: TokenSequence) -> list[int]:
        return [-2 - place for place in range(self._num_drafts)]


class _Replica:
    """A scheduler and its device. prefills: whether it only computes first tokens."""

    def __init__(
        self, simulation: _Simulation, planned: Planned, number: int, *, prefills: bool = False
    ) -> None:
        self._simulation, self._planned, self._prefills = simulation, planned, prefills
        self._number = number
        drafter = _Drafts(planned.num_drafts) if planned.num_drafts else None
        is_counted = planned.counted and drafter is None
        self._counted = CountedRunning(self._take_counted) if is_counted else None
        self._scheduler = Scheduler(
            planned.limits,
            _ENDLESS,
            planned.policy(planned.limits)
            if planned.policy
            else policy_of(planned.mode, planned.limits, planned.idle),
            prefix_cache=planned.prefix_cache,
            drafter=drafter,
            running=self._counted,
        )
        kind = type(self._scheduler.policy)
        self._learns = (kind.scheduled, kind.measured) != (Policy.scheduled, Policy.measured)
        self._random = np.random.default_rng([number, planned.num_drafts])
        self._running: Batch | None = None
        self._seconds = 0.0  # of the running step
        self._block: _Block | None = None  # of steps of which one runs
        self._next: Batch | None = None
        self._coming: deque[_Asked] = deque()  # prefilled by another replica, without pages here yet
        self._heard: deque[_Asked] = deque()  # not yet queued; the host is receiving the first
        self._lost = 0.0  # seconds that the running step loses to the host
        self._asked: dict[TokenSequence, _Asked] = {}
        self.num_chats = 0  # that it answers, also while their prompts are computed by another replica
        # Ends of all steps, and ends of the steps that generate: the same object while all steps do.
        self._ends = self._counted_ends = _StepEnds()
        self.prompt_tokens = self.cached_tokens = self.preempted = 0
        self.busy_seconds = 0.0

    @property
    def steps(self) -> int:
        return len(self._ends.times)

    def num_unfinished(self) -> int:
        outside = len(self._coming) + len(self._heard)
        return len(self._scheduler.running) + len(self._scheduler.waiting) + outside

    def hear(self, asked: _Asked) -> None:
        """Queue a turn once the host has received it."""
        self._cut()
        if not self._planned.request_seconds:
            self.add(asked)
            return
        self._heard.append(asked)
        if len(self._heard) == 1:
            self._take_in()

    def _take_in(self) -> None:
        """Let the host receive the first turn; during a step, both have half of a core."""
        seconds, is_shared = self._planned.request_seconds, self._running is not None
        if is_shared:
            self._lost += seconds
        self._simulation.at(self._simulation.now + (2 * seconds if is_shared else seconds), self._taken_in)

    def _taken_in(self) -> None:
        self.add(self._heard.popleft())
        if self._heard:
            self._take_in()

    def add(self, asked: _Asked) -> None:
        """Queue a turn."""
        self._cut()
        max_tokens = 1 if self._prefills else asked.max_tokens - asked.num_tokens
        prompt, context = asked.prompt, self._planned.limits.context
        if asked.num_tokens:
            prompt = prompt.of_length(len(prompt) + asked.num_tokens)
        if len(prompt) + max_tokens > context:
            raise RequestError(
                f"a prompt of {len(prompt):,} tokens and an answer of {max_tokens:,} make "
                f"{len(prompt) + max_tokens:,}, but the plan's context holds {context:,}",
                param="prompt",
            )

        request = Request(prompt, max_tokens)
        sequence = TokenSequence(request, max_tokens, 0, _ignore, new_tokens=counted_tokens)
        self._asked[sequence] = asked
        self._scheduler.add([sequence])
        if self._running is None:
            self._begin(self._scheduler.schedule())

    def take_over(self, asked: _Asked) -> None:
        """Answer a turn whose first token and pages come from another replica."""
        self._cut()
        self._coming.append(asked)
        self._admit_coming()

    def _admit_coming(self) -> None:
        """Allocate the whole pages of prefilled prompts; the rest of a prompt is computed here."""
        while self._coming:
            replica = max(
                self._scheduler.replicas,
                key=lambda candidate: (len(candidate.free_slots), candidate.pool.num_free),
            )
            if replica.keep_copied(self._coming[0].prompt) is None:
                break
            self.add(self._coming.popleft())

    def _begin(self, batch: Batch | None) -> None:
        """Start a step, and schedule the next one."""
        self._running = batch
        if batch is None:
            return
        if not batch.works and self._counted is not None and (steps := self._num_steady(self._counted)) > 1:
            self._begin_block(batch, steps)
            return
        self._run(self._planned.prices.seconds(*batch.figures), self._simulation.now)

    def _run(self, seconds: float, start: float) -> None:
        """Let the running step end after these seconds, and schedule the next one."""
        self._seconds = seconds
        self.busy_seconds += seconds
        self._simulation.at(start + seconds, self._end, start, self._number)
        self._next = self._scheduler.schedule()

    def _num_steady(self, counted: CountedRunning) -> int:
        """Number of next steps that generate for the same sequences if nothing arrives."""
        if self._scheduler.waiting and self._scheduler.num_free_slots:
            return 1
        return counted.num_steady()

    def _begin_block(self, batch: Batch, num_steps: int) -> None:
        """Start the steps of a block, which all end together unless `_cut` is called before."""
        start, number = self._simulation.now, batch.num_counted
        positions = batch.counted_positions + number * np.arange(num_steps)
        seconds = self._planned.prices.generating(number, positions / number)
        # Sums in the order of a simulation step by step.
        ends = np.cumsum(np.concatenate([(start,), seconds]))[1:]
        self._block = block = _Block(batch, start, seconds, ends)
        since = block.start_of(num_steps - 1)
        self._simulation.at(float(ends[-1]), partial(self._end_block, block), since, self._number)

    def _end_block(self, block: _Block) -> None:
        """End the last step of a block that was not cut."""
        if self._block is not block:
            return
        self._pass(block, len(block.ends) - 1)
        self.busy_seconds += self._seconds
        self._next = self._scheduler.schedule()
        self._end()

    def _cut(self) -> None:
        """Pass the steps of a block that have ended; the step after them runs.

        The schedule made at the end of that step is the first to see what happens now.
        """
        if (block := self._block) is None:
            return
        number = block.num_ended(self._simulation.moment, self._number)
        self._pass(block, number)
        self._run(self._seconds, block.start_of(number))

    def _pass(self, block: _Block, num_ended: int) -> None:
        """Count the first steps of a block as ended, and end the block at the step after them."""
        self._block, self._seconds = None, float(block.seconds[num_ended])
        if not num_ended:
            return
        assert self._counted is not None, "blocks are of counted sequences"
        passed = block.seconds[:num_ended]
        self.busy_seconds = float(np.cumsum(np.concatenate([(self.busy_seconds,), passed]))[-1])
        if self._learns:
            for each in passed.tolist():
                self._scheduler.policy.scheduled(self._scheduler)
                self._scheduler.policy.measured(block.batch, each)
        for times in {id(each): each.times for each in (self._ends, self._counted_ends)}.values():
            times.frombytes(block.ends[:num_ended].tobytes())
        self._counted.skip(num_ended)

    def _end(self) -> None:
        batch = self._running
        assert batch is not None
        if self._lost:
            self._seconds, self._lost, lost = self._seconds + self._lost, 0.0, self._lost
            self.busy_seconds += lost
            self._simulation.at(self._simulation.now + lost, self._end, None, self._number)
            return
        self._step_ended(batch)
        self._scheduler.policy.measured(batch, self._seconds)
        works = [work for work in batch.works if work.samples]
        if self._counted is not None and batch.generates:
            works += self._counted.delivered()
        self._deliver(works)
        # Without a next batch, either these tokens were needed to schedule one, or there were no requests.
        following, self._next = self._next, None
        if self._coming:
            self._admit_coming()
        self._begin(following or self._scheduler.schedule())

    def _step_ended(self, batch: Batch) -> None:
        """Note the time. The ends of steps that generate become a copy when a step does not generate."""
        if not batch.generates and self._counted_ends is self._ends:
            self._counted_ends = _StepEnds(self._ends.times)
        self._ends.times.append(self._simulation.now)
        if batch.generates and self._counted_ends is not self._ends:
            self._counted_ends.times.append(self._simulation.now)

    def _deliver(self, works: list[SequenceWork]) -> None:
        """Hand out the tokens of a step, in the order of rank."""
        if len(works) > 1:
            works.sort(key=lambda work: work.sequence.rank)
        step = self.steps - 1
        for work, scores in self._scheduler.postprocess(works, [self._sampled(work) for work in works]):
            sequence, asked = work.sequence, self._asked[work.sequence]
            for score in scores:
                sequence.take(score.token)
                asked.take(self._ends, step, step + 1)
                if sequence.finish_reason:
                    self._scheduler.release(sequence, sequence.finish_reason)
                    self._finished(sequence)
                    (self._simulation.prefilled if self._prefills else self._simulation.heard)(asked)
                    break

    def _take_counted(self, sequence: TokenSequence, first: int, stop: int) -> None:
        self._asked[sequence].take(self._counted_ends, first, stop)

    def _sampled(self, work: SequenceWork) -> list[TokenScore]:
        if not work.num_drafts:
            return [_TOKEN]
        accepted = []
        for draft in work.drafts:
            if self._random.random() >= self._planned.acceptance:
                break
            accepted.append(TokenScore(draft, 0.0))
        return accepted + [_TOKEN] * (work.num_samples - len(accepted))

    def _finished(self, sequence: TokenSequence) -> None:
        del self._asked[sequence]
        self.prompt_tokens += sequence.num_prompt
        if (
            self._prefills or not self._planned.prefill_replicas
        ):  # otherwise the prefilling replica counts them
            self.cached_tokens += sequence.num_cached
        self.preempted += sequence.num_preempted
