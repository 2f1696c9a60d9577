"""Running prompts without a token of their answer, whose pages later prompts may soon share."""

from collections.abc import Sequence

from meshwright.serve.engine.replica import Replica
from meshwright.serve.engine.sequence import TokenSequence


class UnansweredPrompts:
    """The running sequences of `replicas` that have no token of their answer yet."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._sequences: dict[TokenSequence, None] = {}

    def add(self, sequence: TokenSequence) -> None:
        self._sequences[sequence] = None

    def discard(self, sequence: TokenSequence) -> None:
        self._sequences.pop(sequence, None)

    def compute_next_page_of(self, sequence: TokenSequence) -> bool:
        """Whether one of them computes the next page of this prefix: waiting for it is cheaper."""
        if self._replicas[0].prefixes is None or sequence.reads_every_position:
            return False
        size = self._replicas[0].page_size
        num_known = max(replica.num_known_pages(sequence.tokens) for replica in self._replicas) * size
        prefix = sequence.tokens[: num_known + size]
        if len(prefix) < num_known + size or len(sequence.tokens) == len(prefix):
            return False
        return any(
            not other.num_generated and other.tokens[: len(prefix)] == prefix for other in self._sequences
        )
