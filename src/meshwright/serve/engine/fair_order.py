"""The order of waiting sequences, which keeps one client or request from taking all slots."""

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from meshwright.serve.engine.sequence import TokenSequence


def in_fair_order(
    waiting: Iterable[TokenSequence], running: Sequence[TokenSequence]
) -> Iterator[TokenSequence]:
    """Yield waiting sequences by the fewest running sequences of their client, then of their request.

    Within a priority; otherwise in the given order. A sequence counts as running if it has a slot when the
    next is asked for.
    """
    queues: dict[Hashable, deque[tuple[int, TokenSequence]]] = {}
    for place, sequence in enumerate(waiting):
        queues.setdefault(sequence.group, deque()).append((place, sequence))
    of_client = Counter(sequence.request.client for sequence in running)
    of_group = Counter(sequence.group for sequence in running)

    def turn(group: Hashable) -> tuple[int, int, int, int]:
        place, first = queues[group][0]
        return first.request.priority, of_client[first.request.client], of_group[group], place

    order = [(turn(group), group) for group in queues]
    heapify(order)
    while order:
        key, group = heappop(order)
        if (now := turn(group)) != key:  # others of its client have started since
            heappush(order, (now, group))
            continue
        _, sequence = queues[group].popleft()
        yield sequence
        if sequence.slot is not None:
            of_client[sequence.request.client] += 1
            of_group[group] += 1
        if queues[group]:
            heappush(order, (turn(group), group))
