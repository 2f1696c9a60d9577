"""The slots and pages of one replica: their holders, and cached prefixes. Plain Python.

A sequence has a page for every `page_size` of its positions. Layers with a window have pages of their own: a
sequence keeps the pages that its next token sees, and gives the others back as it grows.
"""

from collections.abc import Sequence
from dataclasses import replace

from meshwright.layout.page_sizes import first_page
from meshwright.serve.engine.batch import CACHED
from meshwright.serve.engine.limits import Limits
from meshwright.serve.engine.pages import NO_PAGE, Move, PagePool, Pages
from meshwright.serve.engine.prefix import PrefixTree
from meshwright.serve.engine.sequence import Tokens, TokenSequence


class Replica:
    """The free slots, pages and cached prefixes of the replica `number`.

    prefix_cache: pages outlive their sequence, unless layers have states without snapshots. window_pool: of
    layers with a window; None if these keep every position.
    """

    def __init__(self, limits: Limits, number: int, *, prefix_cache: bool) -> None:
        first = number * limits.slots_per_replica
        self._limits, self.number, self.page_size = limits, number, limits.page_size
        self._max_taken = limits.slots_per_replica + limits.chunk // limits.page_size + 1  # pages, in a step
        self.free_slots = list(range(first, first + limits.slots_per_replica))[::-1]
        self.pool = PagePool(limits.num_pages)
        self.window_pool = PagePool(limits.num_window_pages) if limits.window else None
        self.host_pool = PagePool(limits.num_host_pages) if limits.num_host_pages else None
        self.prefixes: PrefixTree | None = None
        self.snapshots = PagePool(limits.num_snapshots) if limits.num_snapshots else None
        self.host_snapshots = PagePool(limits.num_host_snapshots) if limits.num_host_snapshots else None
        if prefix_cache and (self.snapshots is not None or not limits.has_states):
            self.prefixes = PrefixTree(
                self.pool,
                limits.page_size,
                self.window_pool,
                limits.window,
                self.host_pool,
                self.snapshots,
                self.host_snapshots,
            )

    @property
    def has_plenty(self) -> bool:
        """Whether more pages are free than its sequences can take in one step, so that none is preempted."""
        return self.window_pool is None and self.pool.num_free > self._max_taken

    @property
    def num_cached_pages(self) -> int:
        """Pages kept for prompts with the same prefix."""
        return 0 if self.prefixes is None else len(self.prefixes)

    def num_known_pages(self, tokens: Tokens | Sequence[int]) -> int:
        """Cached pages of the longest known prefix of `tokens`; the last of them is always computed."""
        return 0 if self.prefixes is None else self.prefixes.num_known(tokens[:-1])

    def suitability(self, tokens: Tokens) -> tuple[int, int, int]:
        """Larger for more known pages of these tokens, then for fewer sequences, then for more free pages."""
        return self.num_known_pages(tokens), len(self.free_slots), self.pool.num_free

    def take_moves(self) -> list[Move]:
        """New moves between cache and host."""
        if self.prefixes is None:
            return []
        moves, self.prefixes.moves = self.prefixes.moves, []
        return [replace(move, replica=self.number) for move in moves]

    def begin(self, sequence: TokenSequence) -> bool:
        """Give a sequence a slot and the cached pages of its prefix.

        False if cached pages are on the host, and the cache has no room yet for the whole sequence.
        """
        known = self._known(sequence)
        self._share(known)
        if self.prefixes is not None and self.host_pool is not None and not sequence.reads_every_position:
            missing = -(-len(sequence.tokens) // self._limits.page_size) - len(known.whole)
            is_fetched = self.prefixes.fetch(sequence.tokens[:-1], missing)
            self._release(known)
            if not is_fetched:
                return False
            known = self._known(sequence)
            self._share(known)
        sequence.slot = self.free_slots.pop()
        sequence.pages, sequence.num_computed = known, len(known.whole) * self._limits.page_size
        return True

    def grow(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Give the sequence pages for `num_tokens` tokens; False if there are too few.

        Pages that its next token does not see are given back first, and cached prefixes evicted if need be.
        """
        if self.window_pool is not None:
            self._release_unseen(sequence, self.window_pool)
        missing = -(-num_tokens // self._limits.page_size) - len(sequence.pages.whole)
        if missing <= 0:
            return True
        return self._take(missing, sequence.pages)

    def num_until_snapshot(self, sequence: TokenSequence, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens come before a position that is worth a snapshot.

        Such positions end the last full page, for the same text again, and the last page that another
        sequence shares. Without one, it is all of the tokens.
        """
        if self.prefixes is None or self.snapshots is None or num_tokens < 2:
            return num_tokens
        start, ends = sequence.num_computed, self._snapshot_ends(self.prefixes, sequence)
        return next((end - start for end in ends if start < end < start + num_tokens), num_tokens)

    def _snapshot_ends(self, prefixes: PrefixTree, sequence: TokenSequence) -> list[int]:
        size, known = self._limits.page_size, sequence.tokens[:-1]
        return sorted((prefixes.num_shared(known) * size, len(known) // size * size))

    def snapshot(self, sequence: TokenSequence) -> int:
        """The snapshot that the states after the computed tokens are saved to; NO_PAGE for none."""
        end = sequence.num_computed
        if self.prefixes is None or self.snapshots is None or end in sequence.snapshots:
            return NO_PAGE
        if end not in self._snapshot_ends(self.prefixes, sequence):
            return NO_PAGE
        if (number := self.prefixes.new_snapshot()) != NO_PAGE:
            sequence.snapshots[end] = number
        return number

    def num_free_positions(self, sequence: TokenSequence) -> int:
        """Tokens that the sequence can take before `grow` changes its pages."""
        size = self._limits.page_size
        free = len(sequence.pages.whole) * size - sequence.num_computed
        if self.window_pool is None or self._limits.window is None:
            return free
        first = first_page(sequence.num_computed, size, self._limits.window)
        if first and sequence.pages.of_window[first - 1] != NO_PAGE:
            return 0
        return min(free, self._limits.window.last((first + 1) * size - 1) + 1 - sequence.num_computed)

    def keep(self, sequence: TokenSequence) -> None:
        """Keep the full pages of a sequence for prompts with the same prefix."""
        if self.prefixes is not None:
            num_known = min(sequence.num_computed, len(sequence.tokens))
            self.prefixes.insert(sequence.tokens[:num_known], sequence.pages)
            for end, snapshot in sequence.snapshots.items():
                self.prefixes.keep_snapshot(sequence.tokens[:end], snapshot)
            sequence.snapshots = {}

    def exported(self, sequence: TokenSequence, num_tokens: int) -> Pages:
        """The pages of the first `num_tokens` tokens that another engine can go on from.

        With states these are the kept pages up to the last snapshot, which the result names.
        """
        if not self._limits.has_states:
            return Pages(sequence.pages.whole[: num_tokens // self.page_size])
        return Pages() if self.prefixes is None else self.prefixes.match(sequence.tokens[:num_tokens])

    def keep_copied(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Keep full pages of tokens that another engine has computed; none if there are too few pages.

        Returns the page of each, which the caller writes, or CACHED, and the snapshot of the states after
        them, NO_PAGE for none.
        """
        if self.prefixes is None:
            return [], NO_PAGE
        known = self.prefixes.match(tokens)
        num_known = len(known.whole)
        self._share(known)  # so that they are not evicted for the others
        has_pages = self._take(len(tokens) // self._limits.page_size - num_known, known)
        if has_pages:
            self.prefixes.insert(tokens, known)
        self._release(known)
        if not has_pages:
            return [], NO_PAGE
        snapshot, num_pages = NO_PAGE, len(known.whole)
        if self.snapshots is not None and num_known < num_pages:
            snapshot = self.prefixes.new_snapshot()
            if snapshot != NO_PAGE:
                self.prefixes.keep_snapshot(tokens[: num_pages * self._limits.page_size], snapshot)
        return [CACHED] * num_known + known.whole[num_known:], snapshot

    def leave(self, sequence: TokenSequence) -> None:
        """Take slot and pages from a sequence."""
        assert sequence.slot is not None
        self.free_slots.append(sequence.slot)
        self._release(sequence.pages)
        if self.snapshots is not None:
            self.snapshots.release([*sequence.snapshots.values()])
            sequence.snapshots = {}
        sequence.slot, sequence.pages, sequence.num_computed, sequence.num_right = None, Pages(), 0, 0

    def _known(self, sequence: TokenSequence) -> Pages:
        if self.prefixes is None or sequence.reads_every_position:
            return Pages()
        return self.prefixes.match(sequence.tokens[:-1])

    def _take(self, count: int, pages: Pages) -> bool:
        """Add `count` pages of each pool to `pages`; False, and none is taken, if there are too few."""
        if self.prefixes is not None:
            self.prefixes.make_room(count)
        whole = self.pool.take(count)
        if whole is None:
            return False
        if self.window_pool is not None:
            of_window = self.window_pool.take(count)
            if of_window is None:
                self.pool.release(whole)
                return False
            pages.of_window += of_window
        pages.whole += whole
        return True

    def _release_unseen(self, sequence: TokenSequence, window_pool: PagePool) -> None:
        """Give back window pages that the sequence's next token does not see."""
        first = first_page(sequence.num_computed, self._limits.page_size, self._limits.window)
        held = sequence.pages.of_window
        begin = first  # all pages before it were given back already
        while begin and held[begin - 1] != NO_PAGE:
            begin -= 1
        if begin < first:
            self.keep(sequence)  # for prompts that share only this part
            window_pool.release(held[begin:first])
            held[begin:first] = [NO_PAGE] * (first - begin)

    def _share(self, pages: Pages) -> None:
        if not pages.whole:
            return
        self.pool.share(pages.whole)
        if self.window_pool is not None:
            self.window_pool.share(pages.held_of_window)

    def _release(self, pages: Pages) -> None:
        self.pool.release(pages.whole)
        if self.window_pool is not None:
            self.window_pool.release(pages.held_of_window)
