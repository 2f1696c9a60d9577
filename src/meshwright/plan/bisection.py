"""The least number that does not meet a condition."""

from collections.abc import Callable


def first_false(holds: Callable[[int], bool], below: int, above: int) -> int:
    """The least number in (below, above] that makes `holds` false; `above` does, and is not asked.

    >>> first_false(lambda number: number < 7, 0, 100)
    7
    """
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if holds(middle) else (below, middle)
    return above
