"""Layouts that nobody named run: loss and gradients of rules drawn at random are those of one device."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from tests.layout.any_rules import any_layouts
from tests.nn.one_device import assert_agrees
from tests.nn.small_models import LOCAL, TINY

from meshwright.layout import Layout

_SETTINGS = settings(
    deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)


@settings(_SETTINGS, max_examples=2)
@given(any_layouts())
def test_they_agree_with_one_device(layout: Layout) -> None:
    assert_agrees(TINY, layout)


@pytest.mark.slow
@settings(_SETTINGS, max_examples=40)
@given(any_layouts())
def test_many_more_do(layout: Layout) -> None:
    assert_agrees(TINY, layout)


@pytest.mark.slow
@settings(_SETTINGS, max_examples=10)
@given(any_layouts())
def test_models_with_windows_and_a_tied_table_do(layout: Layout) -> None:
    assert_agrees(LOCAL, layout)
