"""How sure a price is: ranges conformal over published sources, each predicted without itself."""

from math import log
from statistics import mean

import pytest

from meshwright.plan.spread import INSIDE, LEAST_SOURCES, between_layouts, outside_rows, quantile, spread

SOURCES = sorted({row.source for row in outside_rows() if row.figure == "time"})


def test_ranges_cover_eight_of_ten_rows_of_a_new_source() -> None:
    """By the ranges of the other sources, as for a user's run."""
    covered = []
    for source in SOURCES:
        rows = [row for row in outside_rows() if row.figure == "time" and row.source == source]
        known = [spread(r.kind, r.software, r.chip, r.experts, without=source) for r in rows]
        inside = [abs(r.log_error) <= log(1 + s.within) for r, s in zip(rows, known, strict=True) if s]
        covered.append(mean(inside))
    assert 0.75 <= mean(covered) <= 0.88


def test_a_group_has_enough_sources() -> None:
    found = spread("gpu", "megatron", "a100-80gb", False)
    assert found is not None and found.num_sources >= LEAST_SOURCES
    assert found.group == "megatron on gpu, dense" and not found.unknown
    wider = spread("gpu", "deepspeed", "a100-80gb", False)
    assert wider is not None and wider.group == "gpu, dense" and wider.num_sources > found.num_sources


def test_an_unknown_chip_or_network_widens() -> None:
    known, chip = (spread("gpu", "megatron", name, False) for name in ("h200", "l40s"))
    network = spread("gpu", "megatron", "h200", False, "slingshot")
    assert known and chip and network and known.within < chip.within == network.within
    assert str(chip).endswith("none has l40s, so this is wide)")


def test_there_is_none_of_chips_that_nobody_published() -> None:
    assert spread("cpu", "xla", "cpu", False) is None


def test_a_row_is_once_in_the_file() -> None:
    rows = outside_rows()
    assert len({(row.id, row.value) for row in rows}) == len(rows) > 500


def test_layouts_that_differ_little_cannot_be_told_apart() -> None:
    within = spread("gpu", "megatron", "a100-80gb", False)
    assert within is not None and 1 < between_layouts() < 2


def test_the_quantile_is_interpolated() -> None:
    assert quantile([1.0, 2.0, 3.0], INSIDE) == pytest.approx(2.6)
