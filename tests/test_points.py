"""The share of a bandwidth by size: exact at its points, and never faster for more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.points import fault, share_at


@st.composite
def curves(draw: st.DrawFn) -> tuple[tuple[float, float], ...]:
    sizes = sorted(draw(st.sets(st.integers(1, 10**9), min_size=1, max_size=6)))
    points = tuple((float(size), draw(st.floats(1e-3, 1.0))) for size in sizes)
    kept = points[:1]
    for point in points[1:]:
        if fault((kept[-1], point)) is None:
            kept += (point,)
    return kept


@given(curves())
def test_a_curve_goes_through_its_points(points: tuple[tuple[float, float], ...]) -> None:
    assert fault(points) is None
    assert [share_at(points, size) for size, _ in points] == pytest.approx([share for _, share in points])


@given(curves(), st.floats(1, 1e10), st.floats(1, 1e10))
def test_more_bytes_take_no_less_time(
    points: tuple[tuple[float, float], ...], first: float, second: float
) -> None:
    few, many = sorted((first, second))
    assert few / share_at(points, few) <= many / share_at(points, many) * (1 + 1e-9)


def test_beyond_the_ends_the_share_stays() -> None:
    points = ((1e3, 0.25), (1e5, 0.5))
    assert (share_at(points, 0), share_at(points, 1e9)) == (0.25, 0.5)
    assert share_at((), 5) == 1.0
