"""Scales, ticks and labels of the charts."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.report.draw.chart import Scale, padded_ends
from meshwright.report.draw.marks import bar, disc, kept_apart, label, line
from meshwright.report.palette import COLOURS, CURVES, rules, variables


@given(st.floats(1e-6, 1e12), st.floats(1.01, 1e9), st.integers(2, 12))
def test_logarithmic_ticks_are_round_few_and_inside(low, factor, most):
    scale = Scale(low, low * factor, 0, 500, logarithmic=True)
    ticks = scale.ticks(most)
    assert len(ticks) <= most + 1 and ticks == sorted(ticks)
    assert all(low * 0.99 <= tick <= low * factor * 1.01 for tick in ticks)


@given(st.floats(0, 1e6), st.floats(1e-3, 1e9), st.integers(2, 12))
def test_even_ticks_are_few_and_inside(low, span, most):
    scale = Scale(low, low + span, 0, 500)
    ticks = scale.ticks(most)
    assert len(ticks) <= most + 1
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in ticks)


def test_places_of_values():
    assert Scale(0, 10, 100, 0).place(2.5) == pytest.approx(75)
    decades = Scale(1, 1000, 0, 300, logarithmic=True)
    assert [decades.place(value) for value in (1, 10, 100, 1000)] == pytest.approx([0, 100, 200, 300])


def test_a_narrow_logarithmic_axis_has_ticks_too():
    assert len(Scale(2.2, 6.5, 0, 300, logarithmic=True).ticks()) >= 3


@given(st.lists(st.floats(0, 400), min_size=1, max_size=12))
def test_labels_are_spread_apart_and_kept_inside_where_they_fit(places):
    moved = kept_apart(places, 15, 0, 400)
    assert len(moved) == len(places)
    ordered = sorted(moved)
    assert all(b - a >= 15 - 1e-6 for a, b in pairwise(ordered))
    assert ordered[0] >= -1e-6 and ordered[-1] <= 400 + 1e-6
    # Their order is that of the places.
    by_place = sorted(range(len(places)), key=lambda index: (places[index], moved[index]))
    assert [moved[index] for index in by_place] == ordered


def test_labels_that_have_room_stay_where_they_are():
    assert kept_apart([10, 100, 300], 15, 0, 400) == [10, 100, 300]


def test_padded_holds_its_values():
    low, high = padded_ends([3, 700])
    assert low < 3 and high > 700
    low, high = padded_ends([5])
    assert low < 5 < high


def test_words_are_text_and_never_markup():
    hostile = "<script>alert(1)</script>\"'"
    for mark in (
        label(hostile, 0, 0),
        bar(0, 0, 1, 1, "ink", title=hostile),
        disc(0, 0, 1, "ink", title=hostile),
    ):
        assert "<script" not in mark
    assert "<script" not in line([(0, 0), (1, 1)], "ink", title=hostile)


WORDS = ("ink", "muted", "waiting", *CURVES, *(f"axis-{n}" for n in range(6)))


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_both_themes(name: str, dark: bool):
    """Contrast of every colour that words take against the card: at least 4.5 (WCAG 2.1, 1.4.3)."""
    assert contrast(COLOURS[name][dark], COLOURS["card"][dark]) >= 4.5


def test_a_page_draws_marks_in_the_colours_of_its_theme():
    assert "--compute: #3f63a3;" in variables(dark=False) and "--compute: #5f86cc;" in variables(dark=True)
    assert ".f-compute { fill: var(--compute); }" in rules() and 'class="f-compute"' in bar(
        0, 0, 1, 1, "compute"
    )


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    channels = [int(part, 16) / 255 for part in re.findall("..", colour[1:])]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
