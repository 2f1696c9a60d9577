"""The share of a long list of slow tests that `make nightly` runs: another each night."""

import random
from collections.abc import Sequence
from math import ceil

import pytest

# In place of a seed: no test is left out.
ALL = "all"


def of_tonight(items: Sequence[pytest.Item], seed: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Tests that run and tests that wait for another night, each in their order.

    Of a file's slow cases that are marked `sampled(n)` one of n runs, at least one, drawn by the seed and
    the file's name: all workers of a run draw the same. A case of `make test` always runs.
    """
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if (mark := item.get_closest_marker("sampled")) and item.get_closest_marker("slow"):
            [one_of] = mark.args
            cases.setdefault((item.nodeid.partition("::")[0], one_of), []).append(item)
    left: set[str] = set()
    for (name, one_of), some in cases.items():
        number = len(some) - ceil(len(some) / one_of)
        left |= {item.nodeid for item in random.Random(f"{seed} {name}").sample(some, number)}
    return [one for one in items if one.nodeid not in left], [one for one in items if one.nodeid in left]
