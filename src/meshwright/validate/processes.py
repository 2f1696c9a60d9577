"""Work on the rows of a table, shared out over processes."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


def results_of(
    work: Callable[[_Part], _Result], parts: Sequence[_Part], *, in_processes: bool
) -> Iterator[_Result]:
    """The result of `work` on each part, in their order.

    in_processes: in one process for each core, which is worth their start for a large table; otherwise, and
    on a single core, in this process. work: a function of a module.
    """
    if not in_processes or (os.cpu_count() or 1) == 1:
        yield from map(work, parts)
        return
    # Small tables need not wait for these imports.
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, parts)
