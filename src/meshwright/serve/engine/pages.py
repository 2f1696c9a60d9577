"""The pages of a cache: which are free, how many holders the others have, what moves. Plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field

NO_PAGE = -1  # for positions that no window reaches any more


@dataclass(slots=True)
class Pages:
    """The pages of a sequence, in the order of its positions.

    whole: of layers that see every position. of_window: of layers with a sliding window, NO_PAGE before the
    window; empty if these layers keep every position too. snapshot: number of the states after these pages,
    which a sequence that begins with cached pages starts from; NO_PAGE without layers with states.
    """

    whole: list[int] = field(default_factory=list)
    of_window: list[int] = field(default_factory=list)
    snapshot: int = NO_PAGE

    @property
    def held_of_window(self) -> list[int]:
        return [page for page in self.of_window if page != NO_PAGE]


@dataclass(frozen=True)
class Move:
    """A copy of a page of a replica to a page of host memory (is_out), or back.

    of_states: of a snapshot of states; page and host_page are then numbers of snapshots.
    Moves are made in their order, before the step that they come with.
    """

    page: int
    host_page: int
    is_out: bool
    replica: int = 0
    of_states: bool = False


class PagePool:
    """Pages 0 to num_pages - 1, each free or with one or more holders.

    Only full pages are shared, and full pages are never written again, so that none is copied on write.

    >>> pool = PagePool(2)
    >>> pages = pool.take(2)
    >>> pages, pool.num_free, pool.take(1)
    ([0, 1], 0, None)
    >>> pool.release(pages); pool.num_free
    2
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))[::-1]
        self._holders = [0] * num_pages
        self.num_pages = num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        """Number of holders of the page; 0 if it is free."""
        return self._holders[page]

    def take(self, count: int) -> list[int] | None:
        """`count` free pages with one holder each; None if there are fewer, and then none is taken."""
        if count > len(self._free):
            return None
        rest = len(self._free) - count
        pages = self._free[rest:][::-1]
        del self._free[rest:]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to each page, which has one already."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a holder from each page; pages without holders become free."""
        holders, free = self._holders, self._free
        for page in pages:
            holders[page] -= 1
            if not holders[page]:
                free.append(page)
