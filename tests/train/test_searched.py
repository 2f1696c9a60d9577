"""What a search returns for eight devices runs, and its loss and every gradient are those of one device."""

import random
from dataclasses import replace
from functools import cache

import pytest
from tests.nn.small_models import LATENT, OSS, TINY
from tests.train.one_device import assert_agrees

from meshwright.hardware.catalog import load
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MoE
from meshwright.plan.given import parse_conditions
from meshwright.plan.train import search

EXPERTS = MoE(num_experts=8, experts_per_token=2, d_ff=16, router_bias=True, expert_bias=True)
MODELS = {one.name: one for one in (TINY, replace(OSS, name="experts", moe=EXPERTS), LATENT)}
SEED, NUM_RANKED = 1, 24


@cache
def _found(config: ModelConfig) -> list[str]:
    """The layouts that a search ranks for the tests' batch, pipelines among them."""
    workload, machine = Workload(16, 16), load("cpu:8")
    texts: dict[str, None] = {}
    for given in ("", "pipe>1", "schedule=lanes"):
        ranked = search(
            config,
            machine,
            workload,
            weights_dtype="f32",
            compute_dtypes=("f32",),
            given=parse_conditions(given),
            runnable=True,
            batch_within=(0.0,),
            num_ranked=NUM_RANKED,
        )
        texts |= dict.fromkeys(str(candidate.layout) for candidate in ranked.candidates)
    return list(texts)


@pytest.mark.slow
def test_a_sample_agrees_with_one_device() -> None:
    [text] = random.Random(SEED).sample(_found(TINY), 1)
    assert_agrees(TINY, text)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(3 * NUM_RANKED))
@pytest.mark.parametrize("model", MODELS)
def test_all_agree_with_one_device(model: str, place: int) -> None:
    found = _found(MODELS[model])
    if place < len(found):
        assert_agrees(MODELS[model], found[place])
