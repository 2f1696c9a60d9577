"""Pages and sequences that come to an engine from another, with the keys and values of their prompts."""

from collections.abc import Sequence

from meshwright.serve.engine.batch import Runner
from meshwright.serve.engine.scheduler import Scheduler
from meshwright.serve.engine.sequence import TokenSequence


class Arrivals:
    """Pages and sequences that have come, until the engine's thread takes them in. Not thread-safe by itself.

    Pages are cached before their sequence runs and may be evicted: then they are computed again.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._pages: list[tuple[Sequence[int], object]] = []
        self._sequences: dict[TokenSequence, tuple[int, object]] = {}

    @property
    def sequences(self) -> list[TokenSequence]:
        return list(self._sequences)

    def put_pages(self, tokens: Sequence[int], exported: object) -> None:
        """Add the full pages of a prompt, as another runner exports them."""
        self._pages.append((tokens, exported))

    def put(self, sequence: TokenSequence, num_pages: int, exported: object) -> None:
        """Add a sequence and the first `num_pages` of its pages."""
        self._sequences[sequence] = num_pages, exported

    def discard(self, sequence: TokenSequence) -> bool:
        """Remove a sequence that was not taken in yet; False if there is none."""
        return self._sequences.pop(sequence, None) is not None

    def take_in(self) -> None:
        """Queue the sequences, and write the pages that the cache has room for."""
        pages, self._pages = self._pages, []
        sequences, self._sequences = self._sequences, {}
        for tokens, exported in pages:
            self._write(tokens, exported)
        for sequence, (num_pages, exported) in sequences.items():
            self._scheduler.enqueue(sequence)
            self._write(sequence.tokens[: num_pages * self._runner.limits.page_size], exported)

    def _write(self, tokens: Sequence[int], exported: object) -> None:
        [replica] = self._scheduler.replicas
        pages, snapshot = replica.keep_copied(tokens)
        if pages:
            self._runner.move(self._scheduler.take_moves())  # before these pages are overwritten
            self._runner.accept(pages, exported, snapshot)
