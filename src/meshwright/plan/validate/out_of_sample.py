"""Predictions of published rows as they were without their source."""

from collections.abc import Iterable
from dataclasses import replace
from math import exp

from meshwright.plan.spread import outside_rows
from meshwright.plan.validate.published import PublishedRow
from meshwright.plan.validate.score import Prediction


def out_of_sample(predictions: Iterable[Prediction]) -> list[Prediction]:
    """The predictions of step times, as they were without their source where the constants rest on them."""
    known = {(row.id, row.value): row.log_error for row in outside_rows()}
    found = []
    for given in predictions:
        row = given.row
        log_error = known.get((row.id, row.value))
        if log_error is not None and isinstance(row, PublishedRow) and not given.is_anchor:
            given = replace(given, predicted=row.in_unit(row.seconds() * exp(log_error)))
        found.append(given)
    return found
