"""Predictions of published rows as they were without their source."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from math import exp

from meshwright.plan.spread import outside_rows
from meshwright.validate.score import Prediction

OF_SERVING = "serving_out_of_sample.csv"


def out_of_sample(predictions: Iterable[Prediction]) -> list[Prediction]:
    """The predictions of times, as they were without their source where the constants rest on them."""
    known = {**{(row.id, row.value): row.log_error for row in outside_rows()}, **_of_serving()}
    found = []
    for given in predictions:
        row = given.row
        log_error = known.get((row.id, row.value))
        if log_error is not None and not given.is_anchor:
            given = replace(given, predicted=row.in_unit(row.seconds() * exp(log_error)))
        found.append(given)
    return found


@cache
def _of_serving() -> Mapping[tuple[str, float], float]:
    """The logarithm of predicted over measured seconds of each row, by its id and value.

    Written by benchmarks/fit_inference.py.
    """
    text = (resources.files("meshwright.validate") / OF_SERVING).read_text("utf-8")
    return {
        (row["id"], float(row["value"])): float(row["log_error"]) for row in csv.DictReader(text.splitlines())
    }
