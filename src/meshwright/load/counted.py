"""Counts of texts and running sequences, for simulations: token ids do not matter there.

`CountedText` is the tokens of a chat by their number. `CountedRunning` advances all sequences that generate
by a token at once, so that a simulated step takes time only for sequences that join or leave.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import overload

from meshwright.serve.engine.batch import PENDING, SequenceWork
from meshwright.serve.engine.replica import Replica
from meshwright.serve.engine.running import Running, insert_by_rank
from meshwright.serve.engine.sequence import TokenSequence

# More than the tokens of any chat: the distance between the ids of two chats.
_IDS_PER_CHAT = 1 << 40


class CountedText(Sequence[int]):
    """Tokens of a chat by their number; all chats share the first `num_shared`.

    It is read like a list of ids. Slices of consecutive ids are ranges, which compare and hash in
    constant time.

    >>> a, b = CountedText(1, 2, 5), CountedText(2, 2, 5)
    >>> a[:2] == b[:2], a[:3] == b[:3], a[2:4] == a[2:4]
    (True, False, True)
    """

    __slots__ = ("_chat", "_length", "_num_shared")

    def __init__(self, chat: int, num_shared: int, length: int) -> None:
        self._chat, self._num_shared, self._length = chat, num_shared, length

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CountedText):
            return NotImplemented
        is_same = self._chat == other._chat or self._length <= self._num_shared == other._num_shared
        return is_same and self._length == other._length

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # it grows

    def __iter__(self) -> Iterator[int]:
        shared = min(self._num_shared, self._length)
        yield from range(shared)
        yield from range(self._first_id + shared, self._first_id + self._length)

    @overload
    def __getitem__(self, where: int) -> int: ...
    @overload
    def __getitem__(self, where: slice) -> "Sequence[int]": ...
    def __getitem__(self, where: int | slice) -> "int | Sequence[int]":
        if isinstance(where, int):
            place = range(self._length)[where]
            return place if place < self._num_shared else self._first_id + place
        start, stop, _ = where.indices(self._length)
        stop = max(start, stop)
        if start >= self._num_shared:
            return range(self._first_id + start, self._first_id + stop)
        if stop <= self._num_shared:
            return range(start, stop)
        if start == 0:
            return self.of_length(stop)
        first = self._first_id
        return [*range(start, self._num_shared), *range(first + self._num_shared, first + stop)]

    @property
    def _first_id(self) -> int:
        return (self._chat + 1) * _IDS_PER_CHAT

    def of_length(self, length: int) -> "CountedText":
        """The text of the same chat with `length` tokens."""
        return CountedText(self._chat, self._num_shared, length)

    def append(self, _: int) -> None:
        """Add a token of any id."""
        self._length += 1

    def grow(self, count: int) -> None:
        """Add `count` tokens."""
        self._length += count


def counted_tokens(prompt: Sequence[int]) -> CountedText:
    """The tokens of a sequence with this prompt; tokens of the answer are appended."""
    assert isinstance(prompt, CountedText)
    return prompt.of_length(len(prompt))


class CountedRunning(Running):
    """Running sequences that take a token in every step without being listed in it.

    A sequence is due when it needs a page or has all its tokens. Its fields are brought up to date when it
    leaves, and by `settle`. Steps that generate are numbered from 0.
    on_tokens: called with a sequence, the first step whose token was counted and the step after the last.
    """

    def __init__(self, on_tokens: Callable[[TokenSequence, int, int], None]) -> None:
        super().__init__()
        self._on_tokens = on_tokens
        self._listed: list[TokenSequence] = []  # ordered by rank
        # For counted sequences: the first step that their fields do not include, and the step they are due.
        self._since: dict[TokenSequence, int] = {}
        self._until: dict[TokenSequence, int] = {}
        self._due: defaultdict[int, list[TokenSequence]] = defaultdict(list)
        self._due_steps: list[int] = []  # a heap of the keys of `_due`, with some that are over
        # By step: sequences that have left before the token of this step is known.
        self._late: defaultdict[int, list[TokenSequence]] = defaultdict(list)
        self._num_positions = 0  # of all counted sequences in the next step
        self._num_scheduled = self._num_delivered = 0  # steps

    @property
    def num_counted(self) -> int:
        return len(self._since)

    def add(self, sequence: TokenSequence) -> None:
        super().add(sequence)
        insert_by_rank(self._listed, sequence)

    def remove(self, sequence: TokenSequence) -> None:
        super().remove(sequence)
        self._stop_counting(sequence)
        if sequence in self._listed:
            self._listed.remove(sequence)

    def due(self, replica_of: Callable[[TokenSequence], Replica]) -> list[TokenSequence]:
        step = self._num_scheduled
        for sequence in self._due.pop(step, ()):
            if self._until.get(sequence) != step:
                continue
            num_counted = step - self._since[sequence]
            num_left = sequence.num_left - num_counted
            if num_left < 1:
                self._stop_counting(sequence)
            elif (replica := replica_of(sequence)).has_plenty:
                position = sequence.num_computed + num_counted
                replica.grow(sequence, position + 1)
                capacity = len(sequence.pages.whole) * replica.page_size - position
                self._count_for(sequence, min(capacity, num_left))
            else:
                self._stop_counting(sequence)
                insert_by_rank(self._listed, sequence)
        return list(self._listed)

    def counts(self, sequence: TokenSequence, replica: Replica) -> bool:
        if sequence.num_uncomputed > 1 or not (sequence.num_generated or sequence.num_pending):
            return False
        self._listed.remove(sequence)
        self._since[sequence] = self._num_scheduled
        self._count_for(sequence, min(replica.num_free_positions(sequence), sequence.num_left))
        self._num_positions += sequence.num_computed + 1
        return True

    def _count_for(self, sequence: TokenSequence, num_steps: int) -> None:
        self._until[sequence] = until = self._num_scheduled + num_steps
        if until not in self._due:
            heappush(self._due_steps, until)
        self._due[until].append(sequence)

    def _stop_counting(self, sequence: TokenSequence) -> None:
        if sequence in self._since:
            self.settle(sequence)
            self._num_positions -= sequence.num_computed + 1
            del self._since[sequence], self._until[sequence]

    def settle(self, sequence: TokenSequence) -> None:
        since = self._since.get(sequence)
        if since is None:
            return
        self._since[sequence] = self._num_scheduled
        known = max(since, self._num_delivered)
        sequence.num_computed += self._num_scheduled - since
        sequence.num_pending += self._num_scheduled - known
        for step in range(known, self._num_scheduled):
            self._late[step].append(sequence)
        if known > since:
            assert isinstance(sequence.tokens, CountedText)
            sequence.tokens.grow(known - since)
            sequence.num_generated += known - since
            self._on_tokens(sequence, since, known)

    def step(self, *, generates: bool) -> tuple[int, int]:
        if not generates:
            return 0, 0
        counted = len(self._since), self._num_positions
        self._num_scheduled += 1
        self._num_positions += len(self._since)
        return counted

    def num_steady(self) -> int:
        """Steps from the last scheduled one to the next with a sequence that is due or has left."""
        if self._late:
            return 1
        while self._due_steps and self._due_steps[0] < self._num_scheduled:
            heappop(self._due_steps)
        return self._due_steps[0] + 1 - self._num_scheduled if self._due_steps else 1

    def skip(self, num_steps: int) -> None:
        """Count steps that generate for the same sequences, as scheduled and as delivered."""
        self._num_scheduled += num_steps
        self._num_delivered += num_steps
        self._num_positions += num_steps * len(self._since)

    def delivered(self) -> list[SequenceWork]:
        """Count the end of the next step that generates.

        Returns the works of sequences that left before their token of it.
        """
        late = self._late.pop(self._num_delivered, ())
        self._num_delivered += 1
        return [SequenceWork(sequence, 0, sequence.num_computed, (PENDING,), ()) for sequence in late]
