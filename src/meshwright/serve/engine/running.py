"""The sequences of a scheduler that hold a slot. Plain Python."""

from bisect import insort
from collections.abc import Callable

from meshwright.serve.engine.replica import Replica
from meshwright.serve.engine.sequence import TokenSequence


class Running:
    """Running sequences, ordered by rank; each step looks at all of them.

    A load test of a planned server counts sequences that generate instead of listing them in every batch:
    `meshwright.load.counted.CountedRunning`.
    """

    num_counted = 0

    def __init__(self) -> None:
        self.sequences: list[TokenSequence] = []

    def add(self, sequence: TokenSequence) -> None:
        insert_by_rank(self.sequences, sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Take out a sequence, whose fields are then up to date."""
        self.sequences.remove(sequence)

    def due(self, replica_of: Callable[[TokenSequence], Replica]) -> list[TokenSequence]:
        """The sequences that the next step looks at."""
        return list(self.sequences)

    def counts(self, sequence: TokenSequence, replica: Replica) -> bool:
        """Whether the sequence is counted from this step on, instead of listed in the batch."""
        return False

    def settle(self, sequence: TokenSequence) -> None:
        """Bring the fields of a counted sequence up to date."""

    def step(self, *, generates: bool) -> tuple[int, int]:
        """Schedule a step: (number of counted sequences in it, positions that all of them see).

        generates: whether counted sequences take a token in it; (0, 0) if not.
        """
        return 0, 0


def insert_by_rank(sequences: list[TokenSequence], sequence: TokenSequence) -> None:
    """Insert into a list that is ordered by rank."""
    if not sequences or sequences[-1].rank < sequence.rank:
        sequences.append(sequence)
    else:
        insort(sequences, sequence, key=lambda other: other.rank)
