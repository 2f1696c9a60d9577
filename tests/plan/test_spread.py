"""How sure a price is: from published rows, each predicted without its source."""

from math import expm1

import pytest

from meshwright.plan.spread import INSIDE, outside_rows, quantile, spread


def test_eight_of_ten_similar_rows_are_within() -> None:
    rows = [row for row in outside_rows() if row.software == "megatron-te"]
    found = spread("gpu", "megatron-te", 64, 4, 4)
    assert found is not None and found.num_rows == 40 <= len(rows)
    widest = max(expm1(abs(row.log_error)) for row in rows)
    assert 0 < found.within < widest
    errors = sorted(expm1(abs(row.log_error)) for row in outside_rows() if row.kind == "tpu")
    nearest = spread("tpu", "xla", 256, 1, 1)
    assert nearest is not None and errors[0] < nearest.within <= errors[-1]
    assert len(errors) >= nearest.num_rows


def test_there_is_none_of_chips_that_nobody_published() -> None:
    assert spread("cpu", "xla", 8, 1, 1) is None


def test_a_row_is_once_in_the_file() -> None:
    rows = outside_rows()
    assert len({(row.id, row.value) for row in rows}) == len(rows) > 500


def test_the_quantile_is_interpolated() -> None:
    assert quantile([1.0, 2.0, 3.0], INSIDE) == pytest.approx(2.6)
