"""Work on the rows of a table, shared out over processes."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from meshwright.collector import collector_paused

_Row = TypeVar("_Row")
_Result = TypeVar("_Result")


def results_of(
    work: Callable[[_Row], _Result], parts: Sequence[Sequence[_Row]], *, in_processes: bool, least_rows: int
) -> Iterator[list[_Result]]:
    """The results of `work` on the rows of each part, in the parts' order.

    work: a function at the top level of a module, which other processes import. in_processes: start a process
    for each core, unless there is a single one. The processes are repaid from `least_rows` rows on; with
    fewer none is started.
    """
    on_part = partial(_on_part, work)
    if not in_processes or sum(map(len, parts)) < least_rows or (os.cpu_count() or 1) == 1:
        yield from map(on_part, parts)
        return
    # Small tables need not wait for these imports.
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield from pool.map(on_part, parts)


def _on_part(work: Callable[[_Row], _Result], rows: Sequence[_Row]) -> list[_Result]:
    with collector_paused():
        return [work(row) for row in rows]
