"""Pages of prompts and answers already computed, found again by their tokens. Plain Python.

A page that is evicted from the cache moves to host memory, if there is any, and back for a sequence with the
same prefix: a prompt that comes again, or a sequence that was preempted.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Optional

from meshwright.layout.page_sizes import first_page
from meshwright.models.layer_kinds import Window
from meshwright.serve.engine.pages import NO_PAGE, Move, PagePool, Pages

_Key = Hashable


@dataclass(eq=False)
class _Node:
    """A full page, after the pages of its parents. If it is on the host, so are all of its children.

    window_page: of layers with a window, NO_PAGE if evicted. snapshot, host_snapshot: of the states after it,
    in the cache or in host memory; NO_PAGE for none.
    """

    key: _Key
    page: int
    parent: Optional["_Node"]
    window_page: int = NO_PAGE
    snapshot: int = NO_PAGE
    host_page: int = NO_PAGE
    host_snapshot: int = NO_PAGE
    children: dict[_Key, "_Node"] = field(default_factory=dict)


class PrefixTree:
    """A radix tree over whole pages of tokens (RadixAttention; Zheng et al., 2024).

    A node holds its page in `pool` as a sequence does. Pages without other holders can be evicted, leaves
    first, the least recently used first. Pages in `window_pool` are evicted separately: a prefix is known if
    the next token finds all the positions that it sees through `window`.
    host_pool: pages of host memory, for evicted ones; not together with window_pool.
    snapshots: numbers of copies of the states of layers that have them; a prefix is known up to its last page
    with a copy. The least recently used copy is replaced. host_snapshots: numbers of copies in host memory;
    a copy moves there when it is replaced, or when its page is evicted to the host.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        window_pool: PagePool | None = None,
        window: Window | None = None,
        host_pool: PagePool | None = None,
        snapshots: PagePool | None = None,
        host_snapshots: PagePool | None = None,
    ) -> None:
        assert window_pool is None or host_pool is None
        self._pool, self._page_size = pool, page_size
        self._window_pool, self._window = window_pool, window
        self._host_pool = host_pool or PagePool(0)
        self._snapshots, self._host_snapshots = snapshots, host_snapshots or PagePool(0)
        self._root = _Node((), 0, None)
        # Each the least recently used first.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()
        self._on_host: OrderedDict[_Node, None] = OrderedDict()
        self._with_snapshot: OrderedDict[_Node, None] = OrderedDict()
        self._with_host_snapshot: OrderedDict[_Node, None] = OrderedDict()
        self.moves: list[Move] = []

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_on_host(self) -> int:
        """Pages in host memory."""
        return len(self._on_host)

    def num_known(self, tokens: Sequence[int]) -> int:
        """Pages of the longest known prefix of `tokens`, in the cache or on the host."""
        if self._window_pool is not None:
            return len(self.match(tokens).whole)
        return len(self._resumable(self._path(tokens)))

    def num_shared(self, tokens: Sequence[int]) -> int:
        """Pages of the longest prefix of `tokens` that another sequence had, of use or not."""
        return len(self._path(tokens))

    def match(self, tokens: Sequence[int]) -> Pages:
        """Pages of the longest prefix of `tokens` in the cache; the caller does not hold them yet."""
        nodes = [node for node in self._path(tokens) if node.page != NO_PAGE]
        if self._window_pool is not None:
            nodes = nodes[: self._seen_by_next(nodes)]
        snapshot = NO_PAGE
        if self._snapshots is not None:
            while nodes and nodes[-1].snapshot == NO_PAGE:
                nodes.pop()
            if nodes:
                snapshot = nodes[-1].snapshot
                self._with_snapshot.move_to_end(nodes[-1])
        self._touch(nodes)
        pages = Pages([node.page for node in nodes], snapshot=snapshot)
        if self._window_pool is not None:
            unseen = len(nodes) - self._num_seen(len(nodes))
            pages.of_window = [NO_PAGE] * unseen + [node.window_page for node in nodes[unseen:]]
        return pages

    def new_snapshot(self) -> int:
        """A free number for a copy of states, if need be the least recently used; the caller holds it.

        NO_PAGE if sequences hold all of them.
        """
        assert self._snapshots is not None
        if not self._snapshots.num_free and self._with_snapshot:
            self._drop_snapshot(next(iter(self._with_snapshot)))
        taken = self._snapshots.take(1)
        return taken[0] if taken else NO_PAGE

    def keep_snapshot(self, tokens: Sequence[int], snapshot: int) -> None:
        """Keep a copy of the states after `tokens`, whole pages; free its number if it is of no use."""
        assert self._snapshots is not None
        nodes = self._path(tokens)
        if len(nodes) * self._page_size < len(tokens) or nodes[-1].snapshot != NO_PAGE:
            self._snapshots.release([snapshot])
            return
        self._forget_host_snapshot(nodes[-1])
        nodes[-1].snapshot = snapshot
        self._with_snapshot[nodes[-1]] = None

    def _resumable(self, path: Sequence[_Node]) -> Sequence[_Node]:
        """The path up to its last node with a snapshot, in the cache or on the host."""
        if self._snapshots is None:
            return path
        kept = [n for n, node in enumerate(path, 1) if {node.snapshot, node.host_snapshot} != {NO_PAGE}]
        return path[: max(kept, default=0)]

    def _drop_snapshot(self, node: _Node) -> None:
        """Move the node's snapshot to host memory; without host snapshots, drop it."""
        number = self._forget_snapshot(node)
        if not self._host_snapshots.num_free and self._with_host_snapshot:
            self._forget_host_snapshot(next(iter(self._with_host_snapshot)))
        if numbers := self._host_snapshots.take(1):
            [node.host_snapshot] = numbers
            self._with_host_snapshot[node] = None
            self.moves.append(Move(number, node.host_snapshot, is_out=True, of_states=True))

    def _forget_snapshot(self, node: _Node) -> int:
        """Free the node's snapshot in the cache and return its number."""
        assert self._snapshots is not None
        del self._with_snapshot[node]
        self._snapshots.release([node.snapshot])
        number, node.snapshot = node.snapshot, NO_PAGE
        return number

    def _forget_host_snapshot(self, node: _Node) -> None:
        self._with_host_snapshot.pop(node, None)
        if node.host_snapshot != NO_PAGE:
            self._host_snapshots.release([node.host_snapshot])
            node.host_snapshot = NO_PAGE

    def _fetch_snapshot(self, node: _Node) -> None:
        """Copy the node's snapshot back; it stays on the host if sequences hold all of the cache's."""
        assert self._snapshots is not None
        # First, since a new snapshot may evict another to the host, which must not replace this one.
        del self._with_host_snapshot[node]
        number = self.new_snapshot()
        if number == NO_PAGE:
            self._with_host_snapshot[node] = None
            return
        self.moves.append(Move(number, node.host_snapshot, is_out=False, of_states=True))
        self._forget_host_snapshot(node)
        node.snapshot = number
        self._with_snapshot[node] = None

    def _num_seen(self, count: int) -> int:
        """The number of `count` full pages that the token after them sees through the window."""
        return count - first_page(count * self._page_size, self._page_size, self._window)

    def _seen_by_next(self, nodes: Sequence[_Node]) -> int:
        """The longest prefix of `nodes` after which the next token finds all window pages that it sees."""
        longest = in_a_row = 0
        for count, node in enumerate(nodes, 1):
            in_a_row = in_a_row + 1 if node.window_page != NO_PAGE else 0
            if in_a_row >= self._num_seen(count):
                longest = count
        return longest

    def fetch(self, tokens: Sequence[int], num_pages: int) -> bool:
        """Copy back the host's pages of the prefix of `tokens`, which `match` then finds.

        False, and none is copied, if the cache has no room for `num_pages` pages in all.
        """
        path = self._resumable(self._path(tokens))
        on_host = [node for node in path if node.page == NO_PAGE]
        has_host_snapshot = bool(path) and path[-1].host_snapshot != NO_PAGE
        if not on_host and not has_host_snapshot:
            return True
        if num_pages > self._pool.num_free + sum(self._pool.holders(node.page) == 1 for node in self._nodes):
            return False
        for node in on_host:  # first, so that the host keeps them while it takes others
            del self._on_host[node]
        # `make_room` must not evict the path's own pages, which no sequence may hold.
        here = [node.page for node in path if node.page != NO_PAGE]
        self._pool.share(here)
        if has_host_snapshot:
            self._fetch_snapshot(path[-1])
        self.make_room(len(on_host))
        self._pool.release(here)
        pages = self._pool.take(len(on_host))
        assert pages is not None, "pages that only the tree holds can be evicted"
        for node, page in zip(on_host, pages, strict=True):
            self.moves.append(Move(page, node.host_page, is_out=False))
            self._put_here(node, page)
        return True

    def _put_here(self, node: _Node, page: int) -> None:
        """Move a node from the host to this page of the cache, which it holds."""
        self._host_pool.release([node.host_page])
        node.page, node.host_page = page, NO_PAGE
        self._nodes[node] = None

    def insert(self, tokens: Sequence[int], pages: Pages) -> None:
        """Keep the full pages of `tokens`; known pages with the same contents replace them in `pages`.

        Otherwise a known page, without a holder but this tree, could not be evicted before its children.
        """
        nodes = self._path(tokens)
        for number, (node, page) in enumerate(zip(nodes, list(pages.whole), strict=False)):
            if node.page == NO_PAGE:  # it was computed again
                self._pool.share([page])
                del self._on_host[node]
                self._put_here(node, page)
            elif node.page != page:
                self._pool.share([node.page])
                self._pool.release([page])
                pages.whole[number] = node.page
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
        """Evict until `count` pages of each pool are free, or all others have other holders."""
        self.evict(count - self._pool.num_free)
        if self._window_pool is not None:
            self._evict_of_window(self._window_pool, count - self._window_pool.num_free)

    def evict(self, count: int) -> int:
        """Free up to `count` pages that only the tree holds; how many were freed.

        They move to host memory, which drops its least recently used pages.
        """
        num_freed = num_busy = 0
        while num_freed < count and num_busy < len(self._nodes):
            node = next(iter(self._nodes))
            if not self._is_idle(node):  # it is in use, and is not looked at again soon
                self._nodes.move_to_end(node)
                num_busy += 1
                continue
            self._leave_cache(node)
            num_freed, num_busy = num_freed + 1, 0
        return num_freed

    def _leave_cache(self, node: _Node) -> None:
        del self._nodes[node]
        self._pool.release([node.page])
        if self._window_pool is not None and node.window_page != NO_PAGE:
            self._window_pool.release([node.window_page])
        host_page = self._host_page()
        if host_page is None:
            self._forget(node)
            return
        if node.snapshot != NO_PAGE:
            self._drop_snapshot(node)
        self.moves.append(Move(node.page, host_page, is_out=True))
        node.page, node.host_page = NO_PAGE, host_page
        self._on_host[node] = None

    def _host_page(self) -> int | None:
        """A free page of host memory, if need be the least recently used; None if there is none."""
        if not self._host_pool.num_free:
            if (oldest := next((node for node in self._on_host if not node.children), None)) is None:
                return None
            self._forget(oldest)
        pages = self._host_pool.take(1)
        return pages[0] if pages else None

    def _forget(self, node: _Node) -> None:
        """Take the node out of the tree, with all nodes below it, which are on the host."""
        assert node.parent is not None
        del node.parent.children[node.key]
        removed = [node]
        while removed:
            node = removed.pop()
            removed += node.children.values()
            self._forget_host_snapshot(node)
            if node.snapshot != NO_PAGE:
                self._forget_snapshot(node)
            if node in self._on_host:
                del self._on_host[node]
                self._host_pool.release([node.host_page])

    def _evict_of_window(self, pool: PagePool, count: int) -> None:
        for node in self._nodes:
            if count <= 0:
                return
            if node.window_page != NO_PAGE and pool.holders(node.window_page) == 1:
                pool.release([node.window_page])
                node.window_page, count = NO_PAGE, count - 1

    def _is_idle(self, node: _Node) -> bool:
        has_children = any(child.page != NO_PAGE for child in node.children.values())
        return not has_children and self._pool.holders(node.page) == 1

    def _path(self, tokens: Sequence[int]) -> list[_Node]:
        nodes, node = [], self._root
        for number in range(len(tokens) // self._page_size):
            child = node.children.get(self._key(tokens, number))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def _key(self, tokens: Sequence[int], number: int) -> _Key:
        part = tokens[number * self._page_size : (number + 1) * self._page_size]
        return part if isinstance(part, range) else tuple(part)

    def _touch(self, nodes: Sequence[_Node]) -> None:
        # From the last page to the first, so that the leaf of a path is evicted first.
        for node in reversed(nodes):
            order = self._on_host if node.page == NO_PAGE else self._nodes
            order[node] = None
            order.move_to_end(node)
