"""Texts and steps by the count, for load tests of planned servers, where ids of tokens mean nothing.

`Text` stands for the tokens of a chat. `Together` moves all sequences that generate a token further at once,
however many they are, so that a step takes as long as what is new in it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from meshwright.serve.engine.sequence import Sequence

# Tokens of a chat, at most, and so how far the ids of two chats are apart.
_APART = 1 << 40


class Text(Ordered[int]):
    """A text that is only counted: tokens of chat number `chat`, the first `num_shared` shared by all chats.

    It is read as a list of ids is. Slices of consecutive ids are ranges, which compare and hash at once.

    >>> one, other = Text(1, 2, 5), Text(2, 2, 5)
    >>> one[:2] == other[:2], one[:3] == other[:3], one[2:4] == one[2:4]
    (True, False, True)
    """

    __slots__ = ("_chat", "_length", "_num_shared")

    def __init__(self, chat: int, num_shared: int, length: int) -> None:
        self._chat, self._num_shared, self._length = chat, num_shared, length

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Text):
            return NotImplemented
        alike = self._chat == other._chat or self._length <= self._num_shared == other._num_shared
        return alike and self._length == other._length

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # it grows

    def __iter__(self) -> Iterator[int]:
        shared = min(self._num_shared, self._length)
        yield from range(shared)
        yield from range(self._own + shared, self._own + self._length)

    @overload
    def __getitem__(self, where: int) -> int: ...
    @overload
    def __getitem__(self, where: slice) -> "Ordered[int]": ...
    def __getitem__(self, where: int | slice) -> "int | Ordered[int]":
        if isinstance(where, int):
            place = range(self._length)[where]
            return place if place < self._num_shared else self._own + place
        start, stop, _ = where.indices(self._length)
        stop = max(start, stop)
        if start >= self._num_shared:
            return range(self._own + start, self._own + stop)
        if stop <= self._num_shared:
            return range(start, stop)
        if start == 0:
            return self.of_length(stop)
        own = self._own
        return [*range(start, self._num_shared), *range(own + self._num_shared, own + stop)]

    @property
    def _own(self) -> int:
        return (self._chat + 1) * _APART

    def of_length(self, length: int) -> "Text":
        """The text of the same chat with so many tokens."""
        return Text(self._chat, self._num_shared, length)

    def append(self, _: int) -> None:
        """One token more, whatever its id."""
        self._length += 1

    def grow(self, count: int) -> None:
        """`count` tokens more."""
        self._length += count


class Together:
    """Sequences that take one token in each step, until a step at which they are to be looked at.

    What one has done meanwhile is written into it when it leaves or is asked for (`settle`). The steps of a
    scheduler are numbered from 0. num_steps: that were scheduled. num_delivered: whose tokens are known.
    on_tokens: told a sequence, and the first step of which it has a token that nobody handed to it, and the
    step behind the last.
    """

    def __init__(self, on_tokens: "Callable[[Sequence, int, int], None]") -> None:
        self._on_tokens = on_tokens
        # From which step on a sequence says nothing of itself, and at which step it is to be looked at.
        self._since: dict[Sequence, int] = {}
        self._until: dict[Sequence, int] = {}
        self._looks: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._late: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._contexts = 0
        self.num_steps = self.num_delivered = 0

    @property
    def num_members(self) -> int:
        return len(self._since)

    def join(self, sequence: "Sequence", num_steps: int) -> None:
        """Takes the sequence along from the step that is being scheduled, for so many steps at most."""
        self._since[sequence] = self.num_steps
        self.stay(sequence, num_steps)
        self._contexts += sequence.num_computed + 1

    def due(self) -> "list[Sequence]":
        """The members to look at before the next step: each is then to stay or to leave."""
        step = self.num_steps
        found = self._looks.pop(step, None)
        return [one for one in found if self._until.get(one) == step] if found else []

    def position(self, sequence: "Sequence") -> int:
        """The position of its next token."""
        return sequence.num_computed + self.num_steps - self._since[sequence]

    def num_left(self, sequence: "Sequence") -> int:
        """Tokens that it may still take."""
        return sequence.num_left - self.num_steps + self._since[sequence]

    def stay(self, sequence: "Sequence", num_steps: int) -> None:
        """Takes the sequence along for so many steps more."""
        self._until[sequence] = until = self.num_steps + num_steps
        self._looks[until].append(sequence)

    def leave(self, sequence: "Sequence") -> None:
        """The sequence goes its own way from the step that is being scheduled."""
        if sequence in self._since:
            self.settle(sequence)
            self._contexts -= sequence.num_computed + 1
            del self._since[sequence], self._until[sequence]

    def settle(self, sequence: "Sequence") -> None:
        """Writes down what the sequence has done; tokens of steps under way are delivered to it alone."""
        since = self._since.get(sequence)
        if since is None:
            return
        self._since[sequence] = self.num_steps
        known = max(since, self.num_delivered)
        sequence.num_computed += self.num_steps - since
        sequence.num_pending += self.num_steps - known
        for step in range(known, self.num_steps):
            self._late[step].append(sequence)
        if known > since:
            sequence.grow(known - since)
            self._on_tokens(sequence, since, known)

    def step(self) -> tuple[int, int]:
        """One step further: (how many took part, the positions that they see, of all together)."""
        taken = len(self._since), self._contexts
        self.num_steps += 1
        self._contexts += len(self._since)
        return taken

    def delivered(self) -> "list[Sequence]":
        """The next step's tokens are known: those who are to be handed theirs one by one."""
        late = self._late.pop(self.num_delivered, [])
        self.num_delivered += 1
        for sequence in late:
            sequence.num_pending -= 1
        return late
