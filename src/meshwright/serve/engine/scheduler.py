"""Which sequences run in the next step, and how many tokens of each. Plain Python; not thread-safe by itself.

    batch = scheduler.schedule()
    outputs = runner.run(batch).read()
    for work, tokens in scheduler.postprocess(batch.works, outputs): ...

A step takes the next token of every sequence that generates, and the prompt tokens that the policy allows.
Sequences get pages as they grow. When pages run out, cached prefixes are evicted, then the policy's victim
gives its pages back. It runs again later: pages that are still cached are reused, the others computed again.
The same happens to a sequence that yields its slot to a client with fewer slots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from meshwright.errors import RequestError
from meshwright.serve.engine.batch import PENDING, Batch, SequenceWork
from meshwright.serve.engine.fair_order import PromptShares, in_fair_order, yielding
from meshwright.serve.engine.limits import Limits
from meshwright.serve.engine.occupancy import Occupancy
from meshwright.serve.engine.pages import NO_PAGE, Move, Pages
from meshwright.serve.engine.policy import Interleaved, Policy, StepBudget
from meshwright.serve.engine.replica import Replica
from meshwright.serve.engine.request import FinishReason, TokenScore
from meshwright.serve.engine.running import Running, insert_by_rank
from meshwright.serve.engine.sequence import TokenSequence
from meshwright.serve.engine.speculate import Drafter
from meshwright.serve.engine.unanswered import UnansweredPrompts


@dataclass(slots=True)
class _Step:
    """A batch as it fills. has_preempted: a sequence has lost its pages to another, so none starts."""

    budget: StepBudget
    works: list[SequenceWork] = field(default_factory=list)
    has_preempted: bool = False


class Scheduler:
    """Sequences that wait, and sequences that run in one of `limits.num_slots` slots.

    max_waiting: sequences that may wait, plus one for each free slot.
    policy: None for `Interleaved` without a prefill budget. prefix_cache: pages outlive their sequence, for
    prompts with the same prefix. drafter: guesses tokens, which are verified several a step.
    running: holds the running sequences; None: looks at each of them in every step.
    is_fair: share slots and steps between clients. Waiting sequences then start `in_fair_order`, not in the
    policy's order; running sequences of clients with many slots yield to them (`yielding`); and the prompts
    of a step are in the order of `PromptShares`.
    """

    def __init__(
        self,
        limits: Limits,
        max_waiting: int,
        policy: Policy | None = None,
        *,
        prefix_cache: bool = True,
        drafter: Drafter | None = None,
        running: Running | None = None,
        is_fair: bool = False,
    ) -> None:
        self.limits, self.policy = limits, policy or Interleaved(limits)
        self.replicas = [
            Replica(limits, number, prefix_cache=prefix_cache) for number in range(limits.num_replicas)
        ]
        self._max_waiting, self._shares = max_waiting, PromptShares() if is_fair else None
        self._drafter, self._drafts_pay = drafter or Drafter(), False
        self._waiting: list[TokenSequence] = []
        self._running = running or Running()
        self._unanswered = UnansweredPrompts(self.replicas)
        self._num_arrived = 0

    # The queue, as policies and metrics see it.

    @property
    def waiting(self) -> Sequence[TokenSequence]:
        return self._waiting

    @property
    def running(self) -> Sequence[TokenSequence]:
        return self._running.sequences

    @property
    def unfinished(self) -> list[TokenSequence]:
        return [*self.running, *self._waiting]

    @property
    def num_free_slots(self) -> int:
        return sum([len(replica.free_slots) for replica in self.replicas])

    @property
    def is_generating(self) -> bool:
        if self._running.num_counted:
            return True
        return any(one.num_uncomputed == 1 and one.num_left > 0 for one in self.running)

    @property
    def occupancy(self) -> Occupancy:
        held = ((self._replica_of(one).number, page) for one in self.running for page in one.pages.whole)
        waiting, running = len(self._waiting), len(self.running)
        return Occupancy.of(self.replicas, held, waiting=waiting, running=running)

    # Sequences come and go.

    @property
    def max_answers(self) -> int:
        """Maximum sequences that wait and run at once."""
        return self._max_waiting + self.limits.num_slots

    def add(self, sequences: list[TokenSequence], num_elsewhere: int = 0) -> None:
        """Queue all of `sequences`, or none: RequestError 429 if they do not fit.

        num_elsewhere: sequences that were handed over to another engine and still wait there.
        """
        free = self._max_waiting + self.num_free_slots - len(self._waiting) - num_elsewhere
        _check_fits(len(sequences), self.max_answers, free)
        for sequence in sequences:
            self.enqueue(sequence)

    def enqueue(self, sequence: TokenSequence) -> None:
        """Queue a sequence that was accepted before, here or by another engine."""
        sequence.rank = self.policy.rank(sequence, self._num_arrived)
        self._num_arrived += 1
        insert_by_rank(self._waiting, sequence)

    def release(self, sequence: TokenSequence, reason: FinishReason) -> None:
        """Finish `sequence`, and free its slot and pages or its place in the queue."""
        sequence.finish_reason = reason
        self.remove(sequence, keeps_pages=reason != "failed")

    def remove(self, sequence: TokenSequence, *, keeps_pages: bool = True) -> None:
        """Take out a sequence, whose full pages stay cached.

        A step under way may still write to its pages. The next holder writes later, since steps run in order.
        """
        if sequence.slot is None:
            self._waiting.remove(sequence)
            return
        if keeps_pages:
            self.keep_pages(sequence)
        self._leave(sequence)

    # A step.

    def schedule(self) -> Batch | None:
        """The next step, which now has its pages; None if there is nothing to do yet."""
        due = self._running.due(self._replica_of)
        step = _Step(self.policy.budget(self))
        if self._waiting and self._shares is not None and step.budget.starts:
            for sequence in yielding(self._waiting, self.running, self.num_free_slots):
                self._preempt(sequence)
        self._drafts_pay = self._drafter.pays(len(self.running))
        self._drafter.prepare([one for one in due if one.slot is not None and self._is_drafted(one)])
        for sequence in due if self._shares is None else self._in_turn(due, self._shares, step):
            # No slot: it yielded it above, or was preempted for pages of an earlier sequence of this step.
            if sequence.slot is not None and (step.budget.generates or sequence.num_uncomputed > 1):
                self._continue(sequence, step)
        if self._waiting and step.budget.starts and not step.has_preempted:
            self._start_waiting(step)
        self.policy.scheduled(self)
        if not step.works and not step.budget.generates and self.running:
            self.policy.hold_nothing()
            return self.schedule()
        if not step.works and not self._running.num_counted:
            return None
        generates = step.budget.generates
        counted = self._running.step(generates=generates)
        return Batch(tuple(step.works), *counted, self.take_moves(), generates)

    def postprocess(
        self, works: Sequence[SequenceWork], sampled: Sequence[Sequence[TokenScore]]
    ) -> Iterator[tuple[SequenceWork, Sequence[TokenScore]]]:
        """Yield works with the tokens for their sequences, which the caller appends.

        The caller may release the sequence before the last of them, and releases it if there are none: then
        the request ends with its prompt. Other works that sample nothing are left out. Pages of a prompt are
        kept for others with the first token of its answer.
        """
        for work, tokens in zip(works, sampled, strict=True):
            sequence, is_first = work.sequence, work.sequence.num_generated == 0
            if not work.samples:
                if work.ends_request and sequence.finish_reason is None:
                    yield work, ()
                continue
            accepted = _accepted(work, tokens, self._drafter)
            if sequence.finish_reason is None:
                yield work, accepted
            if is_first:
                self._unanswered.discard(sequence)
                self.keep_pages(sequence)

    def exported(self, sequence: TokenSequence, num_tokens: int) -> Pages:
        """`Replica.exported` of the sequence's replica, after its pages are kept."""
        self.keep_pages(sequence)
        return self._replica_of(sequence).exported(sequence, num_tokens)

    def keep_pages(self, sequence: TokenSequence) -> None:
        """Keep the full pages of a running sequence for prompts with the same prefix."""
        if sequence.slot is not None and self.replicas[0].prefixes is not None:
            self._running.settle(sequence)
            self._replica_of(sequence).keep(sequence)

    def take_moves(self) -> tuple[Move, ...]:
        """Moves between cache and host that must be made before anything is written to pages."""
        if not self.limits.num_host_pages:
            return ()
        return tuple(move for replica in self.replicas for move in replica.take_moves())

    # Running sequences go on.

    def _in_turn(
        self, due: Sequence[TokenSequence], shares: PromptShares, step: _Step
    ) -> Iterator[TokenSequence]:
        """Yield the sequences that generate, then the sequences with prompts in the order of `shares`.

        Before the first prompt, start waiting sequences whose clients have no higher count than its client.
        Otherwise the running prompts of one client could fill every step.
        """
        prompts = [sequence for sequence in due if sequence.num_uncomputed > 1]
        yield from (sequence for sequence in due if sequence.num_uncomputed <= 1)
        if not prompts:
            return
        shares.begin_step([*prompts, *self._waiting])
        prompts.sort(key=shares.turn)
        if step.budget.starts and not step.has_preempted:
            first = prompts[0]
            others = [one for one in self._waiting if one.request.client != first.request.client]
            self._start_waiting(step, [one for one in others if shares.turn(one) <= shares.turn(first)])
        yield from prompts

    def _continue(self, sequence: TokenSequence, step: _Step) -> None:
        if sequence.is_scheduled:
            return
        replica = self._replica_of(sequence)
        num_tokens = replica.num_until_snapshot(sequence, step.budget.num_tokens(sequence, replica))
        if num_tokens < 1:  # negative if drafts are under way
            return
        drafts = self._drafts(sequence)
        if drafts is None or not self._reach(
            sequence, sequence.num_computed + num_tokens + len(drafts), replica, step
        ):
            return
        if not self._running.counts(sequence, replica):
            self._take(sequence, num_tokens, replica, step, drafts)

    def _drafts(self, sequence: TokenSequence) -> list[int] | None:
        """Guesses of the tokens after the last; None if that must be known first.

        None next to prompts, which fill a step as well, nor if a token changes the logits of the next.
        """
        has_edits = sequence.request.edits_logits
        if sequence.num_uncomputed > 1 or not (self._drafts_pay or has_edits):
            return []
        if sequence.num_pending:
            return None
        return self._drafter.draft(sequence)[: sequence.num_left - 1] if self._is_drafted(sequence) else []

    def _is_drafted(self, sequence: TokenSequence) -> bool:
        """Whether a step may verify guesses for the sequence, whose last token is known."""
        if not self._drafts_pay or sequence.num_uncomputed > 1 or sequence.num_pending:
            return False
        return not (sequence.is_scheduled or sequence.request.edits_logits or self._has_prompts)

    @property
    def _has_prompts(self) -> bool:
        return bool(self._waiting and self.num_free_slots) or any(
            sequence.num_uncomputed > 1 for sequence in self.running
        )

    def _reach(self, sequence: TokenSequence, num_tokens: int, replica: Replica, step: _Step) -> bool:
        """Whether the sequence has pages for this number of tokens, if need be taken from victims."""
        while not replica.grow(sequence, num_tokens):
            taken = {work.slot for work in step.works}  # this step computes them, so they keep their pages
            of_replica = (one for one in self.running if self._replica_of(one) is replica)
            victim = self.policy.victim([one for one in of_replica if one.slot not in taken])
            if victim is sequence:
                return False
            self._preempt(victim)
            step.has_preempted = True
        return True

    def _preempt(self, sequence: TokenSequence) -> None:
        """Take the slot and pages of a running sequence, and queue it again; full pages stay cached."""
        self.keep_pages(sequence)
        self._leave(sequence)
        sequence.num_preempted += 1
        insert_by_rank(self._waiting, sequence)

    def _take(
        self,
        sequence: TokenSequence,
        num_tokens: int,
        replica: Replica,
        step: _Step,
        drafts: Sequence[int] = (),
    ) -> None:
        """Add the next tokens of the sequence, which has their pages, and drafts to the step."""
        assert sequence.slot is not None
        start = sequence.num_computed
        tokens = sequence.tokens[start : start + num_tokens]
        samples = num_tokens == sequence.num_uncomputed and sequence.num_left > 0
        is_prompt = sequence.num_uncomputed > 1
        reads = sequence.reads(start, start + num_tokens)
        if drafts or len(tokens) < num_tokens:
            tokens = [*tokens, *[PENDING] * (num_tokens - len(tokens)), *drafts]
        pages, window_pages = tuple(sequence.pages.whole), tuple(sequence.pages.of_window)
        restored, sequence.pages.snapshot = sequence.pages.snapshot, NO_PAGE
        num_right, sequence.num_right = sequence.num_right, 0
        step.budget.take(sequence, replica, num_tokens)
        if is_prompt and self._shares is not None:
            self._shares.take(sequence.request.client, num_tokens)
        sequence.num_computed += len(tokens)
        sequence.num_pending += samples
        step.works.append(
            SequenceWork(
                sequence,
                sequence.slot,
                start,
                tokens,
                pages,
                len(drafts),
                samples,
                window_pages,
                reads,
                self._drafter.logits(sequence) if drafts else (),
                restored=restored,
                saved=replica.snapshot(sequence) if is_prompt else NO_PAGE,
                num_right=num_right,
            )
        )

    # Waiting sequences start.

    def _start_waiting(self, step: _Step, waiting: Sequence[TokenSequence] | None = None) -> None:
        """Start waiting sequences, of the given ones if any are given, while the step has capacity."""
        started, budget = list[TokenSequence](), step.budget
        # Answers of one request share the prompt, which is compared with the running ones once.
        soon_cached = set[int]()
        order = self.policy.admission_order(self._waiting if waiting is None else waiting)
        for sequence in order if self._shares is None else in_fair_order(order, self.running):
            open_replicas = [one for one in self.replicas if one.free_slots and budget.has_room(one)]
            if not open_replicas:
                break
            prompt = id(sequence.request.prompt)
            if sequence.num_pending or (prompt in soon_cached and not sequence.num_generated):
                continue
            if self._unanswered.compute_next_page_of(sequence):
                soon_cached.add(prompt)
                continue
            if len(open_replicas) > 1:
                open_replicas.sort(key=lambda replica: replica.suitability(sequence.tokens))
            for replica in reversed(open_replicas):
                if self._start(sequence, replica, step):
                    started.append(sequence)
                    break
            else:
                break
        for sequence in started:
            self._waiting.remove(sequence)

    def _start(self, sequence: TokenSequence, replica: Replica, step: _Step) -> bool:
        """Whether the sequence now runs on this replica, which may lack pages or budget."""
        if not replica.begin(sequence):
            return False
        num_tokens = replica.num_until_snapshot(sequence, step.budget.num_tokens(sequence, replica))
        if not num_tokens or not replica.grow(sequence, sequence.num_computed + num_tokens):
            replica.leave(sequence)
            return False
        sequence.num_cached = sequence.num_computed
        self._running.add(sequence)
        if not sequence.num_generated:
            self._unanswered.add(sequence)
        self._take(sequence, num_tokens, replica, step)
        return True

    # Sequences leave.

    def _leave(self, sequence: TokenSequence) -> None:
        self._running.remove(sequence)
        self._unanswered.discard(sequence)
        self._replica_of(sequence).leave(sequence)

    def _replica_of(self, sequence: TokenSequence) -> Replica:
        if len(self.replicas) == 1:
            return self.replicas[0]
        assert sequence.slot is not None
        return self.replicas[sequence.slot // self.limits.slots_per_replica]


def _check_fits(num_answers: int, capacity: int, free: int) -> None:
    """Raise RequestError for more answers than the server ever holds, or than its queue has places for."""
    if num_answers > capacity:
        raise RequestError(
            f"{num_answers} answers in one request, but the server holds at most {capacity}", param="n"
        )
    if num_answers > free:
        raise RequestError(
            f"{num_answers} answers asked for, but the queue has room for {free}; retry later",
            status=429,
            code="queue_full",
        )


def _accepted(work: SequenceWork, sampled: Sequence[TokenScore], drafter: Drafter) -> Sequence[TokenScore]:
    """The sampled tokens up to the first that differs from its draft, which is then computed again.

    A draft that was also sampled is right, and the token sampled after it is valid. With the ratio test,
    the sampler yields a draft exactly if the test accepts it.
    """
    sequence, drafts = work.sequence, work.drafts
    sequence.num_pending -= 1
    if not drafts:
        return sampled[:1]
    wrong = (place for place, draft in enumerate(drafts) if sampled[place].token != draft)
    num_right = next(wrong, len(drafts))
    drafter.verified(len(drafts), num_right)
    if sequence.slot is not None:
        sequence.num_computed -= len(drafts) - num_right
        sequence.num_right = num_right
    return sampled[: num_right + 1]
