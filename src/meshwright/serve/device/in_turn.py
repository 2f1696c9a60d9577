"""Programs of a process that must end before the next one starts: on CPUs, programs with collectives."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from meshwright.platforms import platform_of

_ONE_PROGRAM = threading.Lock()  # of all runners of this process


@contextmanager
def one_at_a_time(mesh: jax.sharding.Mesh, results: Callable[[], object]) -> Iterator[None]:
    """Dispatch a program inside the block, which waits for its `results` if programs must not overlap."""
    if mesh.size == 1 or not platform_of(mesh).in_turn:
        yield
        return
    with _ONE_PROGRAM:
        yield
        jax.block_until_ready(results())
