"""Fair use of slots and steps between clients.

`in_fair_order` orders the waiting sequences, `yielding` names the running sequences that give up their slots
to them, and `PromptShares` divides the prompt tokens of a step between clients.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from meshwright.serve.engine.sequence import TokenSequence


class PromptShares:
    """Computed prompt tokens of each client; the client with the fewest has its prompts computed first.

    A virtual token counter (Sheng et al., 2024). A client without prompts loses its count. When it has
    prompts again, its count begins at the lowest of the others, so that it gains nothing by being idle.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def begin_step(self, prompts: Iterable[TokenSequence]) -> None:
        """Keep the counts of the clients of these prompts only. prompts: running and waiting ones."""
        clients = {sequence.request.client for sequence in prompts}
        fewest = min((self._tokens[client] for client in clients & self._tokens.keys()), default=0)
        self._tokens = {client: self._tokens.get(client, fewest) for client in clients}

    def take(self, client: str, num_tokens: int) -> None:
        """Count `num_tokens` prompt tokens that a step computes for the client."""
        self._tokens[client] = self._tokens.get(client, 0) + num_tokens

    def turn(self, sequence: TokenSequence) -> tuple[int, int]:
        """The sort key of a sequence with a prompt: its priority, then its client's count."""
        return sequence.request.priority, self._tokens.get(sequence.request.client, 0)


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
    """The running sequences to stop, so that other clients' waiting sequences get their slots.

    The client with the most running sequences yields, its lowest rank first, until it has less than two more
    than any waiting client. No sequence yields to a lower priority.

    waiting, running: in order of rank. num_free: free slots, which waiting sequences take first.
    """
    num_running = Counter(sequence.request.client for sequence in running)
    queues: dict[str, deque[TokenSequence]] = {}
    for sequence in waiting:
        if not sequence.num_pending:
            queues.setdefault(sequence.request.client, deque()).append(sequence)
    stopped = list[TokenSequence]()
    while queues and running:
        client = min(queues, key=lambda each: num_running[each])
        following = queues[client].popleft()
        if not queues[client]:
            del queues[client]
        if num_free:
            num_free -= 1
        else:
            largest = max(num_running, key=lambda each: num_running[each])
            if num_running[largest] - num_running[client] < 2:
                break
            of_largest = (each for each in reversed(running) if each.request.client == largest)
            last = next((each for each in of_largest if each not in stopped), None)
            if last is None or last.request.priority < following.request.priority:
                break
            stopped.append(last)
            num_running[largest] -= 1
        num_running[client] += 1
    return stopped
