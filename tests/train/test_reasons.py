"""What a run says of a step time that is not the planned one."""

import pytest

from meshwright.train.reasons import Waits, why_not_as_planned


@pytest.mark.parametrize(
    ("measured", "waits", "planned_collectives", "expected"),
    [
        (1.1, Waits(input=0.9), None, None),
        (0.5, Waits(), None, "0.50 times the planned 1 s: the chip or its links are faster"),
        (2.0, Waits(input=0.8), None, "2.00 times the planned 1 s: input: 800 ms of it wait for the next"),
        (2.0, Waits(num_compiled=3), None, "compile: the step was compiled 3 times"),
        (2.0, Waits(load=(9.0, 2)), None, "clock: 9 processes share 2 cores"),
        (2.0, Waits(load=(2.0, 2)), None, "nothing held it up from outside: --profile 10:15 shows"),
        (2.0, Waits(collectives=0.9), 0.1, "collectives: 900 ms of it, 100 ms planned"),
        (2.0, Waits(input=0.3, collectives=0.9), 0.1, "collectives: .*; input: 300 ms"),
    ],
)
def test_the_largest_cause_seen_comes_first(measured, waits, planned_collectives, expected):
    found = why_not_as_planned(measured, 1.0, waits, planned_collectives)
    if expected is None:
        assert found is None
    else:
        import re

        assert found is not None and re.search(expected, found), found
