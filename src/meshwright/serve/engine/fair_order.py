"""The order of waiting sequences and who yields slots to them: no client or request takes all slots."""

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


def yielding(
    waiting: Sequence[TokenSequence], running: Sequence[TokenSequence], num_free: int
) -> list[TokenSequence]:
    """Running sequences, of the clients that have most, whose slots go to waiting ones of other clients.

    After that no client has two more than one that waits. Both are ordered by rank, and the last of a client
    yields first; none yields to a lower priority. num_free: slots that the waiting take first.
    """
    num_running = Counter(sequence.request.client for sequence in running)
    queues: dict[str, deque[TokenSequence]] = {}
    for sequence in waiting:
        if not sequence.num_pending:
            queues.setdefault(sequence.request.client, deque()).append(sequence)
    found = list[TokenSequence]()
    while queues and running:
        client = min(queues, key=lambda each: num_running[each])
        following = queues[client].popleft()
        if not queues[client]:
            del queues[client]
        if num_free:
            num_free -= 1
        else:
            other = max(num_running, key=lambda each: num_running[each])
            if num_running[other] - num_running[client] < 2:
                break
            last = next(
                (one for one in reversed(running) if one.request.client == other and one not in found), None
            )
            if last is None or last.request.priority < following.request.priority:
                break
            found.append(last)
            num_running[other] -= 1
        num_running[client] += 1
    return found
