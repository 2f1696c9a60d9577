"""Pages of prompts and answers already computed, found again by their tokens. Plain Python."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

from meshwright.serve.pages import PagePool

Key = tuple[int, ...]


@dataclass(eq=False)
class _Node:
    """A full page, behind those of its parents."""

    key: Key
    page: int
    parent: Optional["_Node"]
    children: dict[Key, "_Node"] = field(default_factory=dict)


class PrefixTree:
    """A radix tree over whole pages of tokens (RadixAttention; Zheng et al., 2024).

    A node holds its page in `pool` as a sequence does. Those that nobody else holds can be evicted, leaves
    first, the least recently used first.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        self._root = _Node((), 0, None)
        self._nodes: OrderedDict[_Node, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest known beginning of `tokens`; they are not yet held for the caller."""
        nodes = self._path(tokens)
        self._touch(nodes)
        return [node.page for node in nodes]

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Keeps the pages of the tokens' full pages, as far as they are not known already."""
        nodes = self._path(tokens)
        node = nodes[-1] if nodes else self._root
        for number in range(len(nodes), len(tokens) // self._page_size):
            key = self._key(tokens, number)
            child = _Node(key, pages[number], node)
            self._pool.share([child.page])
            node.children[key] = child
            nodes.append(child)
            node = child
        self._touch(nodes)

    def evict(self, count: int) -> int:
        """Frees up to `count` pages that nobody but the tree holds; returns how many."""
        num_freed = 0
        while num_freed < count:
            node = next((node for node in self._nodes if self._is_idle(node)), None)
            if node is None:
                break
            assert node.parent is not None
            del node.parent.children[node.key]
            del self._nodes[node]
            self._pool.release([node.page])
            num_freed += 1
        return num_freed

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
        return tuple(tokens[number * self._page_size : (number + 1) * self._page_size])

    def _touch(self, nodes: Sequence[_Node]) -> None:
        # From the last page to the first, so that of one path a leaf is always the first to go.
        for node in reversed(nodes):
            self._nodes[node] = None
            self._nodes.move_to_end(node)
