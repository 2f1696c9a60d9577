"""Pages in the host's memory: pages evicted from the cache, until copied back or dropped."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import numpy as np

from meshwright.errors import PlanError
from meshwright.serve.engine.limits import on_each


class HostPages:
    """The cache pages of all layers in `num_bytes` of host memory, divided among the replicas.

    page: the types of the arrays of one page per replica, with replicas along the first dimension.
    Raises PlanError if the bytes do not hold one page per replica.
    """

    def __init__(self, page: Any, num_replicas: int, num_bytes: int, page_size: int) -> None:
        leaves = jax.tree.leaves(page)
        page_bytes = sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        # Pages of a model without attention hold nothing.
        self.num_pages = num_bytes // page_bytes if num_bytes else 0
        if num_bytes and not self.num_pages:
            raise PlanError(
                f"a host cache of {num_bytes:,} bytes holds no page of {page_size} positions"
                f"{on_each(num_replicas)}; fits: {page_bytes:,} bytes or more"
            )
        self._structure = jax.tree.structure(page)
        # The system gives memory as it is written to.
        self._kept = [
            np.empty((num_replicas, self.num_pages, *leaf.shape[1:]), leaf.dtype) for leaf in leaves
        ]
        self._arriving: list[tuple[Sequence[Sequence[int]], list[jax.Array]]] = []

    def take(self, numbers: Sequence[Sequence[int]], exported: Any) -> None:
        """Keep the exported pages of each replica under `numbers`, once they have arrived."""
        arrays = jax.tree.leaves(exported)
        for array in arrays:
            array.copy_to_host_async()
        self._arriving.append((numbers, arrays))

    def settle(self) -> None:
        """Waits for the pages on their way."""
        for numbers, arrays in self._arriving:
            for kept, array in zip(self._kept, arrays, strict=True):
                exported = np.asarray(array).reshape(len(numbers), -1, *kept.shape[2:])
                for numbers_kept, pages, arrived in zip(kept, numbers, exported, strict=True):
                    for page, values in zip(pages, arrived, strict=False):
                        numbers_kept[page] = values
        self._arriving.clear()

    def pages(self, numbers: Sequence[Sequence[int]], count: int) -> Any:
        """The pages `numbers` of each replica, padded to `count` pages a replica."""
        self.settle()
        arrays = []
        for kept in self._kept:
            rows = np.zeros((len(numbers), count, *kept.shape[2:]), kept.dtype)
            for row, numbers_kept, pages in zip(rows, kept, numbers, strict=True):
                row[: len(pages)] = numbers_kept[list(pages)]
            arrays.append(rows.reshape(-1, *kept.shape[2:]))
        return jax.tree.unflatten(self._structure, arrays)
