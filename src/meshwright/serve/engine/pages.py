"""The pages of a cache: which are free, how many hold each of the others, what moves. Plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field

NO_PAGE = -1  # of positions that no window reaches any more


@dataclass(slots=True)
class Pages:
    """The pages of a sequence, in the order of its positions.

    whole: of the layers that see every position. of_window: of those with a sliding window, NO_PAGE where
    it has moved on; none where such layers keep every position, too.
    """

    whole: list[int] = field(default_factory=list)
    of_window: list[int] = field(default_factory=list)

    @property
    def held_of_window(self) -> list[int]:
        return [page for page in self.of_window if page != NO_PAGE]


@dataclass(frozen=True)
class Move:
    """A copy of what stands in a page of a replica to a page of the host's memory, or back from there.

    is_out: to the host. Moves are made in their order, before the step that they come with.
    """

    page: int
    host_page: int
    is_out: bool
    replica: int = 0


class PagePool:
    """Pages 0 to num_pages - 1, each free or held by one or more.

    Full pages alone are shared, and nobody writes to a full page again: so none is ever copied on write.

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
        """How many hold the page; 0 if it is free."""
        return self._holders[page]

    def take(self, count: int) -> list[int] | None:
        """`count` free pages, held once each; None if there are fewer, and then none is taken."""
        if count > len(self._free):
            return None
        rest = len(self._free) - count
        pages = self._free[rest:][::-1]
        del self._free[rest:]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One holder more of each of these pages, which somebody holds."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less of each of these pages; those that nobody holds any more are free."""
        holders, free = self._holders, self._free
        for page in pages:
            holders[page] -= 1
            if not holders[page]:
                free.append(page)
