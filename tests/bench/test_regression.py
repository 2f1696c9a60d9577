"""Measured rates are written as points that a machine's file may have."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.bench.regression import monotone
from meshwright.points import fault

RATES = st.floats(1e6, 1e13)


@given(st.dictionaries(st.integers(1, 10**12), RATES, min_size=1, max_size=8))
def test_measured_rates_can_be_read_back(rates: dict[int, float]) -> None:
    """Noise that makes a larger product faster than a smaller one is levelled, to the last bit."""
    points = monotone(rates.items(), most=float("inf"))
    assert fault(points, float("inf")) is None
    assert all(rate <= rates[int(size)] for size, rate in points)
