"""A runner's cache on its devices, with copies of its pages and states in the host's memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from meshwright.layout.page_sizes import compiled_sizes
from meshwright.serve.device.cache_programs import CachePrograms, CacheTypes
from meshwright.serve.device.host_pages import HostCopies, HostSizes
from meshwright.serve.device.in_turn import one_at_a_time
from meshwright.serve.device.step_inputs import slot_on_shard
from meshwright.serve.engine.batch import CACHED, SequenceWork
from meshwright.serve.engine.limits import Limits
from meshwright.serve.engine.pages import NO_PAGE, Move

_NO_SNAPSHOTS: Mapping[int, int] = MappingProxyType({})


class DeviceCache:
    """The pages and states of a runner. Call `compile` before use.

    pools: the arrays. Programs write into them in place, so after each program they are its result.
    host_bytes: of host memory, for evicted pages and snapshots; limits: the runner's, with the sizes of both.
    """

    pools: Any

    def __init__(self, types: CacheTypes, limits: Limits, host_bytes: int) -> None:
        if host_bytes and limits.has_states:
            assert limits.num_snapshots, "pages without the states after them are of no use"
        self._types, self._programs = types, CachePrograms(types)
        page, state = types.exported_pages(1), types.exported_states()
        sizes = HostSizes.of(
            host_bytes,
            page,
            state,
            limits.num_replicas,
            limits.page_size,
            pages_per_snapshot=limits.num_pages // limits.num_snapshots if limits.num_snapshots else 0,
        )
        self._host = HostCopies(page, limits.num_replicas, sizes.num_pages)
        of_shard = types.replicas_per_shard * sizes.num_snapshots
        self._host_states = HostCopies(state, types.num_shards, of_shard)
        self.limits = replace(limits, num_host_pages=sizes.num_pages, num_host_snapshots=sizes.num_snapshots)
        self._copy_states: Any = None
        self._exports: dict[int, Any] = {}
        self._accepts: dict[int, Any] = {}

    def compile(self, *, shares_pages: bool) -> None:
        """Compile the copies that this cache can need. shares_pages: with other runners, too."""
        moves_pages = shares_pages or self.limits.num_host_pages
        for count in compiled_sizes(self.limits.pages_per_context) if moves_pages else ():
            self._exports[count] = self._programs.export(count)
            self._accepts[count] = self._programs.accept(count)
        if self.limits.num_snapshots:
            self._copy_states = self._programs.copy_states()

    def restore(self, works: Iterable[SequenceWork]) -> None:
        """Copy snapshots to the slots of works that begin with one."""
        for work in works if self._copy_states else ():
            if work.restored != NO_PAGE:
                self._copy(work, source=self._entry(work.slot, work.restored), target=self._entry(work.slot))

    def save(self, works: Iterable[SequenceWork]) -> None:
        """Copy the states of works to the snapshots that keep them."""
        for work in works if self._copy_states else ():
            if work.saved != NO_PAGE:
                self._copy(work, source=self._entry(work.slot), target=self._entry(work.slot, work.saved))

    def _copy(self, work: SequenceWork, source: int, target: int) -> None:
        """Copy one entry of the states on the work's shard of the batch."""
        shard = work.slot // self.limits.slots_per_replica // self._types.replicas_per_shard
        with one_at_a_time(self._types.mesh, lambda: self.pools):
            self.pools = self._copy_states(
                self.pools, *(self._on(shard, entry) for entry in (source, target))
            )

    def _on(self, shard: int, entry: int) -> np.ndarray:
        """For each shard of the batch the number of an entry: this one, or the slot that no sequence has."""
        entries = np.full(self._types.num_shards, self._unused, np.int32)
        entries[shard] = entry
        return entries

    def _entry(self, slot: int, snapshot: int | None = None) -> int:
        return slot_on_shard(self.limits, slot, self._types.replicas_per_shard, snapshot)

    @property
    def _unused(self) -> int:
        """The number of a slot that no sequence has."""
        return self.limits.slots_per_replica

    def export(self, pages: Sequence[int], snapshot: int = NO_PAGE) -> Any:
        """Dispatch a copy of the pages' contents and of a snapshot, for another runner of the same model."""
        return self._exported([pages], {0: snapshot})

    def exported(self, num_pages: int) -> Any:
        """Types and shardings of the result of `export` for `num_pages` pages."""
        return self._types.exported(self._size_for([range(num_pages)]))

    def accept(self, pages: Sequence[int], exported: Any, snapshot: int = NO_PAGE) -> None:
        """Dispatch a write of another runner's pages to `pages`, without CACHED ones, and of its snapshot."""
        no_page = self.limits.num_pages
        self._accept([[no_page if page == CACHED else page for page in pages]], exported, {0: snapshot})

    def move(self, moves: Sequence[Move]) -> None:
        """Make these moves between the cache and the host's memory, in their order."""
        for (is_out, of_states), run in groupby(moves, key=lambda move: (move.is_out, move.of_states)):
            if of_states:
                for move in run:
                    self._move_states(move)
                continue
            while part := list(islice(run, self.limits.pages_per_context)):
                by_replica = [
                    [move for move in part if move.replica == number]
                    for number in range(self.limits.num_replicas)
                ]
                pages = [[move.page for move in one] for one in by_replica]
                host_pages = [[move.host_page for move in one] for one in by_replica]
                if is_out:
                    exported = self._exported(pages)
                    self._host.take(host_pages, {name: exported[name] for name in self._types.page_names})
                else:
                    no_states = self._host_states.copies([[]] * self._types.num_shards, 1)
                    copies = self._host.copies(host_pages, self._size_for(pages))
                    self._accept(pages, {**copies, **no_states})

    def settle(self) -> None:
        """Wait for the copies to the host that are under way."""
        self._host.settle()
        self._host_states.settle()

    def _move_states(self, move: Move) -> None:
        """Make this move of a snapshot, without pages."""
        shard, number = divmod(move.replica, self._types.replicas_per_shard)
        copies: list[list[int]] = [[] for _ in range(self._types.num_shards)]
        copies[shard] = [number * self.limits.num_host_snapshots + move.host_page]
        no_pages: list[list[int]] = [[]] * self.limits.num_replicas
        snapshots = {move.replica: move.page}
        if move.is_out:
            exported = self._exported(no_pages, snapshots)
            self._host_states.take(copies, {name: exported[name] for name in self._types.state_names})
            return
        pages = self._host.copies(no_pages, self._size_for(no_pages))
        self._accept(no_pages, {**pages, **self._host_states.copies(copies, 1)}, snapshots)

    def _size_for(self, pages: Sequence[Sequence[int]]) -> int:
        """Pages of each replica in the smallest program that moves these."""
        return min(size for size in self._exports if size >= max(map(len, pages)))

    def _exported(self, pages: Sequence[Sequence[int]], snapshots: Mapping[int, int] = _NO_SNAPSHOTS) -> Any:
        """The contents of each replica's `pages`, and of snapshots by the number of their replica."""
        count, entries = self._size_for(pages), self._entries(snapshots, self._unused)
        return self._exports[count](self.pools, _rows_of(pages, count, 0), entries)

    def _entries(self, snapshots: Mapping[int, int], without: int) -> np.ndarray:
        """For each shard of the batch the entry of its replica's snapshot, or the number `without`."""
        entries = np.full(self._types.num_shards, without, np.int32)
        for replica, snapshot in snapshots.items():
            if snapshot != NO_PAGE:
                entry = self._entry(replica * self.limits.slots_per_replica, snapshot)
                entries[replica // self._types.replicas_per_shard] = entry
        return entries

    def _accept(
        self, pages: Sequence[Sequence[int]], exported: Any, snapshots: Mapping[int, int] = _NO_SNAPSHOTS
    ) -> None:
        """Write exported pages to each replica's `pages`, and snapshots, by the number of their replica."""
        count = self._size_for(pages)
        numbers = _rows_of(pages, count, self.limits.num_pages)  # no page
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._types.exported(count))
        entries = self._entries(snapshots, self._types.replicas_per_shard * self.limits.num_state_entries)
        given = jax.device_put(exported, shardings)
        self.pools = self._accepts[count](self.pools, numbers, entries, given)


def _rows_of(pages: Sequence[Sequence[int]], count: int, fill: int) -> np.ndarray:
    """i32[R count]: the pages of each replica, padded with `fill`."""
    rows = np.full((len(pages), count), fill, np.int32)
    for row, pages_of_row in zip(rows, pages, strict=True):
        row[: len(pages_of_row)] = pages_of_row
    return rows.reshape(-1)
