"""Pages of prompts and answers already computed, found again by their tokens. Plain Python."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Optional

from meshwright.serve.pages import NO_PAGE, PagePool, Pages

Key = Hashable


@dataclass(eq=False)
class _Node:
    """A full page, behind those of its parents; window_page: of layers with a window, NO_PAGE if evicted."""

    key: Key
    page: int
    parent: Optional["_Node"]
    window_page: int = NO_PAGE
    children: dict[Key, "_Node"] = field(default_factory=dict)


class PrefixTree:
    """A radix tree over whole pages of tokens (RadixAttention; Zheng et al., 2024).

    A node holds its page in `pool` as a sequence does. Those that nobody else holds can be evicted, leaves
    first, the least recently used first. Pages in `window_pool` are evicted apart, and a beginning is known
    as far as the last `window` positions before its end have theirs.
    """

    def __init__(
        self, pool: PagePool, page_size: int, window_pool: PagePool | None = None, window: int = 0
    ) -> None:
        self._pool, self._page_size = pool, page_size
        self._window_pool, self._window = window_pool, window
        self._root = _Node((), 0, None)
        self._nodes: OrderedDict[_Node, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Sequence[int]) -> Pages:
        """The pages of the longest known beginning of `tokens`; they are not yet held for the caller."""
        nodes = self._path(tokens)
        if self._window_pool is None:
            self._touch(nodes)
            return Pages([node.page for node in nodes])
        nodes = nodes[: self._seen_by_next(nodes)]
        self._touch(nodes)
        unseen = len(nodes) - self._num_seen(len(nodes))
        seen = [node.window_page for node in nodes[unseen:]]
        return Pages([node.page for node in nodes], [NO_PAGE] * unseen + seen)

    def _num_seen(self, count: int) -> int:
        """Of `count` full pages, how many the token behind them sees through the window."""
        return count - max(0, count * self._page_size - self._window + 1) // self._page_size

    def _seen_by_next(self, nodes: Sequence[_Node]) -> int:
        """How many of the nodes there may be at most, for the token behind to find what it sees."""
        most = in_a_row = 0
        for count, node in enumerate(nodes, 1):
            in_a_row = in_a_row + 1 if node.window_page != NO_PAGE else 0
            if in_a_row >= self._num_seen(count):
                most = count
        return most

    def insert(self, tokens: Sequence[int], pages: Pages) -> None:
        """Keeps the pages of the tokens' full pages, as far as they are not known already."""
        nodes = self._path(tokens)
        node = nodes[-1] if nodes else self._root
        for number in range(len(nodes), len(tokens) // self._page_size):
            key = self._key(tokens, number)
            child = _Node(key, pages.whole[number], node)
            self._pool.share([child.page])
            node.children[key] = child
            nodes.append(child)
            node = child
        if self._window_pool is not None:
            for node, page in zip(nodes, pages.of_window, strict=False):
                if node.window_page == NO_PAGE != page:
                    self._window_pool.share([page])
                    node.window_page = page
        self._touch(nodes)

    def make_room(self, count: int) -> None:
        """Evicts until so many pages of each pool are free, as far as nobody else holds them."""
        self.evict(count - self._pool.num_free)
        if self._window_pool is not None:
            self._evict_of_window(self._window_pool, count - self._window_pool.num_free)

    def evict(self, count: int) -> int:
        """Frees up to `count` pages that nobody but the tree holds; returns how many."""
        num_freed = num_busy = 0
        while num_freed < count and num_busy < len(self._nodes):
            node = next(iter(self._nodes))
            if not self._is_idle(node):  # it is used now, and need not be met again soon
                self._nodes.move_to_end(node)
                num_busy += 1
                continue
            assert node.parent is not None
            del node.parent.children[node.key]
            del self._nodes[node]
            self._pool.release([node.page])
            if self._window_pool is not None and node.window_page != NO_PAGE:
                self._window_pool.release([node.window_page])
            num_freed, num_busy = num_freed + 1, 0
        return num_freed

    def _evict_of_window(self, pool: PagePool, count: int) -> None:
        for node in self._nodes:
            if count <= 0:
                return
            if node.window_page != NO_PAGE and pool.holders(node.window_page) == 1:
                pool.release([node.window_page])
                node.window_page, count = NO_PAGE, count - 1

    def _is_idle(self, node: _Node) -> bool:
        return not node.children and self._pool.holders(node.page) == 1

    def _path(self, tokens: Sequence[int]) -> list[_Node]:
        nodes, node = [], self._root
        for number in range(len(tokens) // self._page_size):
            child = node.children.get(self._key(tokens, number))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def _key(self, tokens: Sequence[int], number: int) -> Key:
        part = tokens[number * self._page_size : (number + 1) * self._page_size]
        return part if isinstance(part, range) else tuple(part)

    def _touch(self, nodes: Sequence[_Node]) -> None:
        # From the last page to the first, so that of one path a leaf is always the first to go.
        for node in reversed(nodes):
            self._nodes[node] = None
            self._nodes.move_to_end(node)
