"""Work on the rows of a table, shared out over processes."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


def results_of(
    work: Callable[[_Part], _Result], parts: Sequence[_Part], *, in_processes: bool
) -> Iterator[_Result]:
    """The result of `work` on each part, in the parts' order.

    work: a function at the top level of a module, which other processes import. in_processes: whether to
    start a process for each core, which only a large table repays; on a single core none is started.
    """
    if not in_processes or (os.cpu_count() or 1) == 1:
        yield from map(work, parts)
        return
    # Small tables need not wait for these imports.
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, parts)
