"""The cheapest servers for a load, by simulation."""

import pytest

from meshwright.engines.serving_engine import ENGINES
from meshwright.hardware.catalog import load
from meshwright.load.rated import RatedLoad, cheapest_servers
from meshwright.models.presets import load_model
from meshwright.plan.serve.search import Infeasible

MODEL, ENGINE = load_model("llama-3.1-8b"), ENGINES["vllm"]
MACHINES = [load("h100:1x1"), load("h100:1x2")]
PRECISION = {"weights_dtype": "bf16", "compute_dtype": "bf16"}


def planned(rate: float, **targets: float):
    asked = RatedLoad(rate, [(1000, 200)], **targets)
    return cheapest_servers(MODEL, MACHINES, ENGINE, asked, [PRECISION]), asked


def test_more_requests_take_more_servers():
    few, _ = planned(2, ttft_p95=1.0, tpot_p95=0.03)
    many, asked = planned(60, ttft_p95=1.0, tpot_p95=0.03)
    assert few.best.chips == 1 < many.best.chips
    assert many.best.missed is None and many.best.ttft_p95 <= 1.0 and many.best.tpot_p95 <= 0.03
    assert all(servers.missed and servers.cost < many.best.cost for servers in many.cheaper)
    document = many.to_dict(asked)
    hourly = document["best"]["price_per_hour"]
    assert document["price_per_day"] == 24 * hourly
    assert document["price_per_million_tokens"] == pytest.approx(hourly / (60 * 200 * 3600) * 1e6)
    assert document["launch"]["command"].startswith("vllm serve llama-3.1-8b")


@pytest.mark.slow
def test_fewer_servers_than_the_best_miss_a_target():
    """The estimate from which the search begins may be too high; 20 requests/s of 2,000 tokens need 9."""
    asked = RatedLoad(20, [(2000, 500)], ttft_p95=1.0, tpot_p95=0.03)
    machines = [load("l40s:1x2"), load("h100:1x8")]
    plan = cheapest_servers(load_model("llama-3-8b"), machines, ENGINE, asked, [PRECISION])
    assert plan.best.missed is None and plan.best.replicas > 1
    fewer = [each for each in plan.cheaper if each.replicas == plan.best.replicas - 1]
    assert fewer and all(each.missed for each in plan.cheaper)
    assert plan.other is not None and plan.other.server.hardware.chip.name == "h100"
    assert plan.to_dict(asked)["other"]["price_per_hour"] > plan.best.price_per_hour


def test_servers_without_targets_keep_up_with_the_rate():
    """One L4 would answer 20 requests/s with a first token after minutes, since its queue only grows."""
    asked = RatedLoad(20, [(1000, 200)])
    machines = [load("l4:1x1"), load("l4:1x2")]
    plan = cheapest_servers(MODEL, machines, ENGINE, asked, [PRECISION])
    assert plan.best.ttft_p95 < 5 and plan.best.chips > 5
    assert plan.cheaper and all("grows by" in str(each.missed) for each in plan.cheaper)


def test_servers_over_the_price_of_an_hour_are_refused():
    with pytest.raises(Infeasible, match=r"cost 10\.80 an hour, more than --max-price-per-hour 5$"):
        planned(2, max_price_per_hour=5.0)


def test_targets_that_nothing_meets_are_named():
    with pytest.raises(Infeasible, match=r"for a single request; .* gives a token in .*, not 1 ms"):
        planned(1, tpot_p95=0.001)
    with pytest.raises(Infeasible, match=r"gives the first token in .*, not 1 ms$"):
        planned(1, ttft_p95=0.001)
