"""Sequences and pages of an engine at one moment."""

from dataclasses import astuple, dataclass


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

    def __add__(self, other: "Occupancy") -> "Occupancy":
        return Occupancy(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
