"""Ranges of the figures of servers under load, by errors of published load tests (`plan/spread.py`)."""

from typing import Any

from meshwright.engines.serving_engine import ENGINES, ServingEngine
from meshwright.hardware.topology import Hardware
from meshwright.models.config import ModelConfig
from meshwright.plan.spread import ONE_POOL, POOLS_APART, serving_spread


def serving_ranges(
    config: ModelConfig,
    hardware: Hardware,
    engine: ServingEngine,
    *,
    ttft_seconds: float,
    tpot_seconds: float,
    tokens_per_second: float | None = None,
    pools_apart: bool = False,
) -> dict[str, Any]:
    """[low, high] of each figure by its name, and in words the load tests that they come from."""
    pools = POOLS_APART if pools_apart else ONE_POOL
    group = (pools, ENGINES.root(engine.name), hardware.chip.name, config.moe is not None)
    spreads = {name: serving_spread(f"{name}_seconds", *group) for name in ("tpot", "ttft", "e2e")}
    known = {
        "tpot_seconds": spreads["tpot"].interval(tpot_seconds),
        "ttft_seconds": spreads["ttft"].interval(ttft_seconds),
    }
    if tokens_per_second is not None:  # requests that take this time pass with the same frequency
        known["tokens_per_second"] = spreads["e2e"].interval(tokens_per_second)
    of = spreads["tpot"]
    return {
        **{name: list(interval) for name, interval in known.items()},
        "group": f"{of.num_sources} published pairs of engine and model: {of.group}",
    }
