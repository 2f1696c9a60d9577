"""Who runs in which slot: first come, first served. Plain Python; not thread-safe by itself."""

from collections import deque

from meshwright.errors import RequestError
from meshwright.serve.sequence import FinishReason, Sequence


class Scheduler:
    """Sequences that wait, and those that run in one of `num_slots` slots.

    Every slot is free or holds one sequence. At most `max_waiting` sequences wait beyond those
    that a free slot will take.
    """

    def __init__(self, num_slots: int, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._capacity = max_waiting + num_slots
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._free = list(range(num_slots))[::-1]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> dict[int, Sequence]:
        """The sequence in each slot that is taken."""
        return dict(self._running)

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self._running.values(), *self._waiting]

    def add(self, sequences: list[Sequence]) -> None:
        """Queue all of `sequences`, or none: RequestError 429 if they do not fit."""
        room = self._max_waiting + len(self._free) - self.num_waiting
        if len(sequences) > self._capacity:
            raise RequestError(
                f"{len(sequences)} answers in one request, but the server holds at most {self._capacity}",
                param="n",
            )
        if len(sequences) > room:
            raise RequestError(
                f"{len(sequences)} answers asked for, but the queue has room for {room}; retry later",
                status=429,
                code="queue_full",
            )
        self._waiting.extend(sequences)

    def admit(self) -> Sequence | None:
        """The sequence that has waited longest, now in a slot; None if nobody waits or no slot is free."""
        if not self._waiting or not self._free:
            return None
        sequence = self._waiting.popleft()
        sequence.slot = self._free.pop()
        self._running[sequence.slot] = sequence
        return sequence

    def release(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish `sequence` and free its slot or its place in the queue."""
        sequence.finish_reason = reason
        if sequence.slot is None:
            self._waiting.remove(sequence)
            return
        del self._running[sequence.slot]
        self._free.append(sequence.slot)
