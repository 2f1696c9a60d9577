"""Predictions of published rows with constants that were fitted without the rows' source."""

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
    """The predictions, out of sample for rows whose source the constants were fitted to."""
    known = {
        **{(row.id, row.value): row.log_error for row in outside_rows() if row.figure == "time"},
        **_of_serving(),
    }
    scored = []
    for prediction in predictions:
        row = prediction.row
        log_error = known.get((row.id, row.value))
        if log_error is not None and not prediction.is_anchor:
            prediction = replace(prediction, predicted=row.in_unit(row.seconds() * exp(log_error)))
        scored.append(prediction)
    return scored


@cache
def _of_serving() -> Mapping[tuple[str, float], float]:
    """log(predicted / measured seconds) of each row, by its id and value.

    Written by benchmarks/fit_inference.py.
    """
    text = (resources.files("meshwright.validate") / OF_SERVING).read_text("utf-8")
    return {
        (row["id"], float(row["value"])): float(row["log_error"]) for row in csv.DictReader(text.splitlines())
    }
