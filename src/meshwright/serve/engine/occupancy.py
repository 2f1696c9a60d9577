"""Sequences and pages of an engine at one moment."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from meshwright.serve.engine.replica import Replica


@dataclass(frozen=True)
class Occupancy:
    """Sequences that wait and run, and pages by use.

    held_pages: of running sequences. cached_pages: kept for later prompts; a page may be held and cached.
    host_pages: all pages of host memory. cached_on_host: host pages in use.
    """

    waiting: int
    running: int
    pages: int
    free_pages: int
    held_pages: int
    cached_pages: int
    host_pages: int
    cached_on_host: int

    @classmethod
    def of(
        cls, replicas: Sequence[Replica], held: Iterable[tuple[int, int]], *, waiting: int, running: int
    ) -> "Occupancy":
        """The occupancy of replicas. held: numbers of a replica and a page, once for each sequence."""
        return cls(
            waiting=waiting,
            running=running,
            pages=sum(one.pool.num_pages for one in replicas),
            free_pages=sum(one.pool.num_free for one in replicas),
            held_pages=len(set(held)),
            cached_pages=sum(one.num_cached_pages for one in replicas),
            host_pages=sum(one.host_pool.num_pages for one in replicas if one.host_pool is not None),
            cached_on_host=sum(one.prefixes.num_on_host for one in replicas if one.prefixes is not None),
        )

    def __add__(self, other: "Occupancy") -> "Occupancy":
        return Occupancy(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
