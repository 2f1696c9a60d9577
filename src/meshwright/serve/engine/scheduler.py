"""Who runs in the next step, and how many tokens of each. Plain Python; not thread-safe by itself.

Each step takes the next token of every sequence that generates, and of prompts as many tokens as fit beside
them (chunked prefill; Agrawal et al., 2023), those of waiting sequences included. Pages are given out as
sequences grow. Where they run out, cached prefixes are evicted, and then the sequence that came last gives
its pages back. What nobody needed of them until it runs again, or what the host's memory has taken up
meanwhile, it gets back; the rest is computed again.

For a load test of a planned server it is asked to count: then what generates is not looked at step by step
(`counted.Together`), and all else is done as for a server that runs.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import astuple, dataclass
from typing import Literal, Protocol, get_args

from meshwright.errors import RequestError
from meshwright.serve.engine.batch import PENDING, Batch, Limits, SequenceWork
from meshwright.serve.engine.counted import Together
from meshwright.serve.engine.pace import Pace
from meshwright.serve.engine.pages import Move
from meshwright.serve.engine.replica import Replica
from meshwright.serve.engine.sequence import FinishReason, Sequence, TokenScore

# Prompts that came together with those that were prefilled first: if no more chunks of them are left, they
# are prefilled before anybody generates. One gap of as many chunks then takes the place of dozens of steps,
# each twice as long for a block of a prompt.
CHUNKS_OF_A_BURST = 2

Mode = Literal["interleaved", "batched"]
MODES: tuple[Mode, ...] = get_args(Mode)
# Prefill and generation each have a scheduler, which is then interleaved.
DISAGGREGATED = "disaggregated"


def mode_of(asked: str) -> Mode:
    """The mode of each scheduler of a server whose mode is `asked`."""
    return "batched" if asked == "batched" else "interleaved"


class Drafter(Protocol):
    """Guesses how a sequence goes on."""

    def pays(self, num_sequences: int) -> bool:
        """Whether a step of so many sequences is worth guessing for."""
        ...

    def draft(self, sequence: Sequence) -> list[int]:
        """The next tokens of `sequence`, as far as it dares."""
        ...

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Tells how many of the guesses of one sequence were right."""
        ...


@dataclass(frozen=True)
class Counts:
    """Sequences that wait and run; pages: all, free ones, those of sequences that run, those kept for others.

    A page that is kept may be of a sequence that runs as well. host_pages: all of the host's memory;
    cached_on_host: those kept there.
    """

    waiting: int
    running: int
    pages: int
    free_pages: int
    held_pages: int
    cached_pages: int
    host_pages: int
    cached_on_host: int

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


class Scheduler:
    """Sequences that wait, and those that run in one of `limits.num_slots` slots.

    At most `max_waiting` sequences wait beyond those that a free slot will take.
    mode: "interleaved", or "batched": the next sequences begin once all of a batch have finished.
    prefix_cache: whether pages outlive their sequence, for others that begin alike. drafter: guesses tokens,
    which are verified several a step. first_only: a sequence is prefilled, and handed over after its first
    token. pace: bounds the prompt tokens beside sequences that generate; None: by `limits.chunk` alone.
    on_tokens: sequences that generate are counted, not listed in batches; see `Together`. The caller
    then hands out the tokens of each step with `delivered_together`, and none stops before its last.
    """

    def __init__(
        self,
        limits: Limits,
        max_waiting: int,
        *,
        mode: Mode = "interleaved",
        prefix_cache: bool = True,
        drafter: Drafter | None = None,
        first_only: bool = False,
        pace: Pace | None = None,
        on_tokens: Callable[[Sequence, int, int], None] | None = None,
    ) -> None:
        assert on_tokens is None or (drafter is None and not first_only)
        self._pace = pace
        self.limits, self._mode, self._drafter, self._first_only = limits, mode, drafter, first_only
        self._max_waiting = max_waiting
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._together = None if on_tokens is None else Together(on_tokens)
        # Those of them that are not `together` and have tokens to sample.
        self._apart = self._running if on_tokens is None else []
        self._unanswered: dict[Sequence, None] = {}  # those that run and have no token of their answer
        numbers = range(limits.num_replicas)
        self.replicas = [Replica(limits, number, prefix_cache=prefix_cache) for number in numbers]
        self._num_arrived = 0
        self._drafts_pay = False
        self._is_filling = False  # a batch or a burst, whose prompts are prefilled before any of it generates
        self._burst = 0  # blocks that may still be prefilled since a step in which nobody generated

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that hold a slot, the most urgent first."""
        return list(self._running)

    @property
    def num_cached_pages(self) -> int:
        """Pages that are kept for sequences that begin alike."""
        return sum(len(replica.prefixes) for replica in self.replicas if replica.prefixes is not None)

    @property
    def counts(self) -> Counts:
        """How full it is."""
        pools = [replica.pool for replica in self.replicas]
        size = self.limits.slots_of_replica
        running = [(one.slot // size, one) for one in self._running if one.slot is not None]
        held = {(replica, page) for replica, one in running for page in one.pages.whole}
        return Counts(
            self.num_waiting,
            self.num_running,
            sum(pool.num_pages for pool in pools),
            sum(pool.num_free for pool in pools),
            len(held),
            self.num_cached_pages,
            self.limits.num_host_pages * self.limits.num_replicas,
            sum(one.prefixes.num_on_host for one in self.replicas if one.prefixes is not None),
        )

    def take_moves(self) -> tuple[Move, ...]:
        """The moves between cache and host to be made before anything else is written to pages."""
        if not self.limits.num_host_pages:
            return ()
        return tuple(move for replica in self.replicas for move in replica.take_moves())

    @property
    def _num_free_slots(self) -> int:
        return sum([len(replica.free_slots) for replica in self.replicas])

    def _replica_of(self, sequence: Sequence) -> Replica:
        if len(self.replicas) == 1:
            return self.replicas[0]
        assert sequence.slot is not None
        return self.replicas[sequence.slot // self.limits.slots_of_replica]

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self._running, *self._waiting]

    def add(self, sequences: list[Sequence], num_elsewhere: int = 0) -> None:
        """Queue all of `sequences`, or none: RequestError 429 if they do not fit.

        num_elsewhere: that were handed over and still wait.
        """
        capacity = self._max_waiting + self.limits.num_slots
        room = self._max_waiting + self._num_free_slots - self.num_waiting - num_elsewhere
        if len(sequences) > capacity:
            raise RequestError(
                f"{len(sequences)} answers in one request, but the server holds at most {capacity}",
                param="n",
            )
        if len(sequences) > room:
            raise RequestError(
                f"{len(sequences)} answers asked for, but the queue has room for {room}; retry later",
                status=429,
                code="queue_full",
            )
        for sequence in sequences:
            self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.rank = sequence.request.priority, self._num_arrived
        self._num_arrived += 1
        _insert(self._waiting, sequence)

    def hand_over(self, sequence: Sequence) -> list[int]:
        """The full pages of a sequence that is another scheduler's from now on; they stay cached here.

        It has none where it lost them.
        """
        if sequence.slot is None:
            self._waiting.remove(sequence)
            return []
        self.computed(sequence)
        pages = sequence.pages.whole[: sequence.num_computed // self.limits.page_size]
        self._leave(sequence)
        return pages

    def adopt(self, sequence: Sequence, num_pages: int) -> list[int]:
        """Queue a sequence that was handed over, and give out pages for its first `num_pages`.

        They are cached pages until it runs, and may be evicted: then they are computed again. ALREADY_THERE
        stands for each that is known here. None at all where there is no room for them.
        """
        self._enqueue(sequence)
        return self.keep_copied(sequence.tokens[: num_pages * self.limits.page_size])

    def keep_copied(self, tokens: Ordered[int]) -> list[int]:
        """Cached pages for tokens that were computed elsewhere, as `adopt` gives them out."""
        [replica] = self.replicas
        return replica.keep_copied(tokens) or []

    def num_known_pages(self, tokens: Ordered[int]) -> int:
        """Cached pages that `tokens` begin with."""
        caches = [replica.prefixes for replica in self.replicas]
        return max(0 if cache is None else cache.num_known(tokens) for cache in caches)

    def schedule(self) -> Batch | None:
        """The next step, whose pages are now given out; None where there is nothing to do yet."""
        chunk = self.limits.chunk
        if self._mode == "interleaved":
            blocks = self._blocks_of_a_burst()
            self._is_filling, chunk = bool(blocks), blocks * self.limits.block or chunk
        elif not self._running:
            self._is_filling = True
        if self._together is not None:
            self._look_at_those_due(self._together)
        step = _Step(self.limits, self._paced, chunk)
        self._drafts_pay = self._drafter is not None and self._drafter.pays(self.num_running)
        for sequence in list(self._apart):
            is_held = self._is_filling and sequence.num_uncomputed == 1
            # Without a slot: one that came before has just taken its pages.
            if sequence.slot is not None and not is_held:
                self._continue(sequence, step)
        if self._waiting and not step.has_preempted and (self._mode == "interleaved" or self._is_filling):
            self._admit(step)
        if self._pace is not None:
            self._pace.scheduled(is_waiting=bool(self._waiting and self._num_free_slots))
        if self._is_filling and not step.works and self._running:
            self._is_filling, self._burst = False, 0
            return self.schedule()
        works, together = tuple(step.works), self._together
        if together is not None and (works or together.num_members):
            return Batch(works, *together.step(), moves=self.take_moves())
        return Batch(works, moves=self.take_moves()) if works else None

    @property
    def _paced(self) -> float | None:
        """The time of prompts that fits beside those that generate; None where nobody does."""
        if self._pace is None or self._is_filling:
            return None
        return self._pace.room() if self._generates else None

    @property
    def _generates(self) -> bool:
        """Whether any sequence does."""
        if self._together is not None and self._together.num_members:
            return True
        return any(one.num_uncomputed == 1 and one.num_left > 0 for one in self._apart)

    def _blocks_of_a_burst(self) -> int:
        """Blocks of a replica's step before which sequences that have just begun wait; 0: they go on.

        No more than there are, as a program has them: one of twice as many would take twice as long.
        """
        limits, blocks_of_chunk = self.limits, self.limits.chunk // self.limits.block
        if self._pace is None:
            return 0
        if not self._generates:
            self._burst = CHUNKS_OF_A_BURST * blocks_of_chunk
            return 0
        if not self._burst:
            return 0
        prompts = (*self._running, *self._waiting[: self._num_free_slots])
        blocks = sum(-(-one.num_uncomputed // limits.block) for one in prompts if one.num_uncomputed > 1)
        of_replica = -(-blocks // len(self.replicas))
        if not 0 < of_replica <= self._burst:
            self._burst = 0
            return 0
        taken = max(size for size in limits.sizes_of_blocks if size <= of_replica)
        self._burst -= taken
        return taken

    def _continue(self, sequence: Sequence, step: "_Step") -> None:
        # Where nothing is left to sample, the last token is under way, and nobody reads what it would write.
        if sequence.num_left < 1:
            return
        replica = self._replica_of(sequence)
        count = step.room_for(sequence, replica)
        if count < 1:  # fewer than none: drafts are under way
            return
        has_begun = sequence.num_generated + sequence.num_pending > 0
        if self._first_only and has_begun:
            return
        if self._together is not None and has_begun and sequence.num_uncomputed == 1:
            self._count_from_now(self._together, sequence, replica, step)
            return
        drafts = self._drafts(sequence, count)
        if drafts is None:
            return
        if not self._reach(sequence, sequence.num_computed + count + len(drafts), replica, step):
            return
        step.take(sequence, count, drafts, replica)

    def _look_at_those_due(self, together: Together) -> None:
        """Gives those a page that need no more, and sees to the others one by one."""
        size = self.limits.page_size
        for sequence in together.due():
            left = together.num_left(sequence)
            if left < 1:
                together.leave(sequence)
                continue
            replica = self._replica_of(sequence)
            if replica.has_plenty:
                position = together.position(sequence)
                replica.grow(sequence, position + 1)
                together.stay(sequence, min(len(sequence.pages.whole) * size - position, left))
            else:
                together.leave(sequence)
                _insert(self._apart, sequence)

    def _count_from_now(
        self, together: Together, sequence: Sequence, replica: Replica, step: "_Step"
    ) -> None:
        """Counts the sequence among those that generate, if it has a page for its next token."""
        if self._reach(sequence, sequence.num_computed + 1, replica, step):
            self._apart.remove(sequence)
            together.join(sequence, min(replica.room(sequence), sequence.num_left))

    def _drafts(self, sequence: Sequence, count: int) -> list[int] | None:
        """Guesses behind the sequence's last token; None where that must be known first.

        Not beside prompts, which fill a step as well as guesses do, nor where each token changes the logits
        of the next.
        """
        is_followed = self._drafts_pay or sequence.edits is not None
        if sequence.num_uncomputed > 1 or not is_followed:
            return []
        if sequence.num_pending:
            return None
        if self._drafter is None or not self._drafts_pay or sequence.edits is not None or self._has_prompts:
            return []
        return self._drafter.draft(sequence)[: sequence.num_left - 1]

    @property
    def _has_prompts(self) -> bool:
        waits = self._waiting and self._num_free_slots
        return bool(waits) or any(sequence.num_uncomputed > 1 for sequence in self._running)

    def _admit(self, step: "_Step") -> None:
        place = 0
        while place < len(self._waiting):
            able = [replica for replica in self.replicas if replica.free_slots and step.room_on(replica) > 0]
            if not able:
                return
            sequence = self._waiting[place]
            if sequence.num_pending or self._soon_cached(sequence):
                place += 1
                continue
            # Where most of its pages are; of equals where the fewest sequences are, and the most free pages.
            if len(able) > 1:
                able.sort(key=lambda one: (one.num_known(sequence), len(one.free_slots), one.pool.num_free))
            for replica in reversed(able):
                if self._admit_to(replica, sequence, step):
                    break
            else:
                return

    def _admit_to(self, replica: Replica, sequence: Sequence, step: "_Step") -> bool:
        """Whether the sequence now runs there: not where pages are missing."""
        if not replica.begin(sequence):
            return False
        count = step.room_for(sequence, replica)
        if not count or not replica.grow(sequence, sequence.num_computed + count):
            replica.leave(sequence)
            return False
        self._waiting.remove(sequence)
        sequence.num_cached = sequence.num_computed
        _insert(self._running, sequence)
        if self._together is not None:
            _insert(self._apart, sequence)
        if not sequence.num_generated:
            self._unanswered[sequence] = None
        step.take(sequence, count, [], replica)
        return True

    def _soon_cached(self, sequence: Sequence) -> bool:
        """Whether a prompt that begins alike is being prefilled: waiting for its pages is cheaper."""
        if self.replicas[0].prefixes is None:
            return False
        size = self.limits.page_size
        known = max(replica.num_known(sequence) for replica in self.replicas) * size
        begin = sequence.tokens[: known + size]
        if len(begin) < known + size or len(sequence.tokens) == len(begin):
            return False
        return any(
            not other.num_generated and other.tokens[: len(begin)] == begin for other in self._unanswered
        )

    def _reach(self, sequence: Sequence, num_tokens: int, replica: Replica, step: "_Step") -> bool:
        """Whether the sequence now has pages for so many tokens, if need be from those that came later."""
        while not replica.grow(sequence, num_tokens):
            victim = next(one for one in reversed(self._running) if self._replica_of(one) is replica)
            if victim is sequence:
                return False
            self._preempt(victim)
            step.has_preempted = True
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.computed(sequence)
        self._leave(sequence)
        sequence.num_preempted += 1
        _insert(self._waiting, sequence)

    def _leave(self, sequence: Sequence) -> None:
        if self._together is not None:
            self._together.leave(sequence)
            if sequence in self._apart:
                self._apart.remove(sequence)
        self._running.remove(sequence)
        self._unanswered.pop(sequence, None)
        self._replica_of(sequence).leave(sequence)

    def accepted(self, work: SequenceWork, sampled: Ordered[TokenScore]) -> Ordered[TokenScore]:
        """The tokens that follow, of what a step sampled for one work; called once for each that samples.

        A draft that was sampled too is right, and what was sampled behind it holds: so an answer is the same
        as without drafts. Of the first wrong one on, what was computed is written again.
        """
        sequence, drafts = work.sequence, work.drafts
        sequence.num_pending -= 1
        if not drafts:
            return sampled[:1]
        wrong = (place for place, draft in enumerate(drafts) if sampled[place].token != draft)
        num_right = next(wrong, len(drafts))
        if self._drafter is not None:
            self._drafter.verified(len(drafts), num_right)
        if sequence.slot is not None:
            sequence.num_computed -= len(drafts) - num_right
        return sampled[: num_right + 1]

    def delivered(self, work: SequenceWork, sampled: Ordered[TokenScore]) -> Iterator[TokenScore]:
        """The tokens of one work for its sequence to take one by one, until it has finished.

        With the first of an answer, the pages of its prompt are kept.
        """
        sequence, is_first = work.sequence, work.sequence.num_generated == 0
        for token in self.accepted(work, sampled):
            if sequence.finish_reason is not None:
                return
            yield token
        if is_first:
            self._unanswered.pop(sequence, None)
            self.computed(sequence)

    def delivered_together(self) -> list[Sequence]:
        """Called once for each step, in order, where sequences are counted.

        Yields those who are to take a token of it one by one, since they do not go together any more.
        """
        assert self._together is not None
        return [one for one in self._together.delivered() if one.finish_reason is None]

    def computed(self, sequence: Sequence) -> None:
        """Keeps the full pages of a running sequence for others that begin alike."""
        if sequence.slot is None:
            return
        replica = self._replica_of(sequence)
        if replica.prefixes is not None:
            if self._together is not None:
                self._together.settle(sequence)
            replica.keep(sequence)

    def release(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish `sequence`, and free its slot and pages or its place in the queue.

        A step under way may still write to its pages: whoever gets them next writes later, since steps run in
        order.
        """
        sequence.finish_reason = reason
        if sequence.slot is None:
            self._waiting.remove(sequence)
            return
        if reason != "failed":
            self.computed(sequence)
        self._leave(sequence)


def _insert(sequences: list[Sequence], sequence: Sequence) -> None:
    """Puts the sequence where its rank is."""
    if not sequences or sequences[-1].rank < sequence.rank:
        sequences.append(sequence)
    else:
        insort(sequences, sequence, key=lambda one: one.rank)


class _Step:
    """A batch as it fills, and how many prompt tokens of each replica it still has room for.

    paced: of each replica, the time of prompts that fits beside those that generate; None where nobody does.
    chunk: most prompt tokens of a replica.
    """

    __slots__ = ("_block", "_chunk", "_limits", "_most", "_room", "_time", "has_preempted", "works")

    def __init__(self, limits: Limits, paced: float | None, chunk: int) -> None:
        self.works: list[SequenceWork] = []
        self._room: dict[Replica, int] = {}
        self._time: dict[Replica, float] = {}
        self._limits, self._block, self._chunk = limits, limits.block, chunk
        self._most = limits.longest_prompts if paced is None else min(limits.longest_prompts, paced)
        self.has_preempted = False

    def room_on(self, replica: Replica) -> int:
        return self._room.get(replica, self._chunk)

    def room_for(self, sequence: Sequence, replica: Replica) -> int:
        """How many of its next tokens fit: one always does, as the slots of a step are not prompt tokens.

        Of the first prompt so does a block. Far behind its beginning fewer tokens take hardly less time: all
        that were before are read for one as for a block. Where time is for some of a prompt, they fill the
        program that they run in.
        """
        wanted = sequence.num_uncomputed
        if wanted == 1:
            return 1
        block, room, start = self._block, self.room_on(replica), sequence.num_computed
        left = self._most - self._time.get(replica, 0.0)
        most = -(-min(room, wanted) // block) * block
        asked = most
        while most > 0 and self._limits.prompt_time(start, most) > left:
            most -= block
        if most < asked and self._limits.multiplies_padding and start + most < self._limits.even_context:
            most = min(asked, self._filled_up(room, most))
        if most <= 0:
            most = block if room >= self._chunk else 0
        return min(most, wanted)

    def _filled_up(self, room: int, most: int) -> int:
        """The tokens of a prompt with which its step fills a program, where time would be for `most` more.

        The program is that nearest to the time, or the smallest for what the step has already: tokens that
        it has no room for would take one of twice as many, and room that is left takes as long as tokens do.
        """
        block, sizes = self._block, self._limits.sizes_of_blocks
        used = (self._chunk - room) // block
        wanted = used + most // block
        place = bisect_left(sizes, wanted)
        larger, smaller = sizes[place], sizes[max(place - 1, 0)]
        nearest = larger if larger * smaller <= wanted * wanted else smaller
        return (max(nearest, sizes[bisect_left(sizes, used)]) - used) * block

    def take(self, sequence: Sequence, count: int, drafts: list[int], replica: Replica) -> None:
        """Asks for the next `count` tokens of the sequence, whose pages reach so far, and for the drafts."""
        start = sequence.num_computed
        tokens = sequence.tokens[start : start + count]
        samples = count == sequence.num_uncomputed
        if drafts or len(tokens) < count:
            tokens = [*tokens, *[PENDING] * (count - len(tokens)), *drafts]
        assert sequence.slot is not None
        pages, of_window = tuple(sequence.pages.whole), tuple(sequence.pages.of_window)
        self.works.append(
            SequenceWork(sequence, sequence.slot, start, tokens, pages, len(drafts), samples, of_window)
        )
        if count > 1:
            padded = -(-count // self._block) * self._block
            self._room[replica] = self.room_on(replica) - padded
            self._time[replica] = self._time.get(replica, 0.0) + self._limits.prompt_time(start, padded)
        sequence.num_computed += len(tokens)
        sequence.num_pending += samples
