"""A measured load test beside its simulation, and the anchor that it writes."""

import json

import pytest

from meshwright.errors import DataError
from meshwright.load.beside import beside, factor_of

TIMES = {"p50": 0.02, "p95": 0.04}


def document(times: float) -> dict:
    scaled = {name: times * value for name, value in TIMES.items()}
    return {
        "ttft_seconds": scaled,
        "tpot_seconds": scaled,
        "new_tokens_per_second": 100 / times,
        "results": [{}],
        "price": {"per_hour": 9.0, "per_million_tokens": 25.0 * times, "currency": "USD"},
    }


def test_measured_figures_have_the_planned_ones_beside_them(tmp_path):
    compared = beside(document(1.5), document(1.0))
    rows = {row["name"]: row for row in compared["results"][1:]}
    assert rows["tpot_seconds p95"]["ratio"] == pytest.approx(1.5)
    assert rows["new_tokens_per_second"]["predicted_new_tokens_per_second"] == 100
    assert compared["price"]["per_million_tokens"] == pytest.approx(25 * 1.5)  # at the measured rate
    path = tmp_path / "run.json"
    path.write_text(json.dumps(compared))
    assert factor_of(path) == pytest.approx(1.5)


def test_steps_that_are_anchored_take_that_many_times_as_long():
    import numpy as np

    from meshwright.load.planned_server import ScaledPrices

    class Prices:
        def seconds(self, num_sequences, mean_context, chunks, num_drafts) -> float:
            return 2.0

        def generating(self, num_sequences, mean_contexts) -> np.ndarray:
            return np.full(len(mean_contexts), 2.0)

    scaled = ScaledPrices(Prices(), 1.5)
    assert scaled.seconds(1, 1.0, (), 0) == 3.0
    assert scaled.generating(1, np.ones(2)).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("text", ["{}", "[]", '{"anchor": {"step_seconds": null}}', "x"])
def test_a_file_without_an_anchor_says_how_to_write_one(tmp_path, text: str):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(DataError, match="--url URL --plan PLAN -o"):
        factor_of(path)
