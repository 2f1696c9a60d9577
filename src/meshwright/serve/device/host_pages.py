"""Copies in the host's memory of evicted pages and of states, until copied back or dropped."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from meshwright.errors import PlanError
from meshwright.serve.engine.limits import on_each


class HostSizes(NamedTuple):
    """Numbers of pages and of snapshots of states of each replica in host memory."""

    num_pages: int = 0
    num_snapshots: int = 0

    @classmethod
    def of(
        cls,
        num_bytes: int,
        page: Any,
        state: object,
        num_replicas: int,
        page_size: int,
        pages_per_snapshot: int = 0,
    ) -> "HostSizes":
        """The sizes that fill `num_bytes`, divided among the replicas; zeros for no bytes.

        page: the types of the arrays of one page of each replica; state: of a snapshot. pages_per_snapshot:
        pages of the device cache per snapshot; 0 without states. Raises PlanError if the bytes do not hold
        one of each.
        """
        if not num_bytes:
            return cls()
        page_bytes = _num_bytes(page)
        state_bytes = _num_bytes(state) if pages_per_snapshot else 0
        if num_bytes < page_bytes + state_bytes:
            snapshot = " and no snapshot of states" if state_bytes else ""
            raise PlanError(
                f"a host cache of {num_bytes:,} bytes holds no page of {page_size} positions{snapshot}"
                f"{on_each(num_replicas)}; fits: {page_bytes + state_bytes:,} bytes or more"
            )
        if not state_bytes:
            return cls(num_bytes // page_bytes)
        num_snapshots = max(1, num_bytes // (state_bytes + pages_per_snapshot * page_bytes))
        if not page_bytes:  # the model has no attention
            return cls(num_snapshots * pages_per_snapshot, num_snapshots)
        return cls((num_bytes - num_snapshots * state_bytes) // page_bytes, num_snapshots)


def _num_bytes(types: Any) -> int:
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(types))


class HostCopies:
    """`num_copies` numbered copies of arrays for each of `num_groups` groups, replicas or shards.

    types: of the arrays of one copy per group, with groups along the first dimension.
    """

    def __init__(self, types: Any, num_groups: int, num_copies: int) -> None:
        self._structure = jax.tree.structure(types)
        # The system gives memory as it is written to.
        self._kept = [
            np.empty((num_groups, num_copies, *leaf.shape[1:]), leaf.dtype) for leaf in jax.tree.leaves(types)
        ]
        self._arriving: list[tuple[Sequence[Sequence[int]], list[jax.Array]]] = []

    def take(self, numbers: Sequence[Sequence[int]], exported: Any) -> None:
        """Keep the exported arrays of each group under `numbers`, once they have arrived."""
        arrays = jax.tree.leaves(exported)
        for array in arrays:
            array.copy_to_host_async()
        self._arriving.append((numbers, arrays))

    def settle(self) -> None:
        """Wait for the copies in flight."""
        for numbers, arrays in self._arriving:
            for kept, array in zip(self._kept, arrays, strict=True):
                exported = np.asarray(array).reshape(len(numbers), -1, *kept.shape[2:])
                for of_group, taken, arrived in zip(kept, numbers, exported, strict=True):
                    for number, values in zip(taken, arrived, strict=False):
                        of_group[number] = values
        self._arriving.clear()

    def copies(self, numbers: Sequence[Sequence[int]], count: int) -> Any:
        """The copies `numbers` of each group, padded to `count` a group."""
        self.settle()
        arrays = []
        for kept in self._kept:
            rows = np.zeros((len(numbers), count, *kept.shape[2:]), kept.dtype)
            for row, of_group, given in zip(rows, kept, numbers, strict=True):
                row[: len(given)] = of_group[list(given)]
            arrays.append(rows.reshape(-1, *kept.shape[2:]))
        return jax.tree.unflatten(self._structure, arrays)
