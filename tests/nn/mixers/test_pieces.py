"""Mixers with a state under context parallelism: loss and gradients of packed documents as on one device."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.nn.one_device import Arrays, Step, assert_equal
from tests.nn.small_models import (
    CONVOLUTION,
    DELTA,
    DELTA_BY_ELEMENT,
    LIGHTNING,
    LINEAR_UNIT,
    MAMBA,
    SELECTIVE,
    TINY,
)

from meshwright.layout import Layout
from meshwright.models.config import ModelConfig

TWO_DELTAS = replace(DELTA, num_layers=2)
B, T = 8, 48
_RNG = np.random.default_rng(1)
TOKENS = _RNG.integers(0, TINY.vocab_size, (B, T + 1), dtype=np.int32)
# Documents of several lengths: within a piece, over several pieces, and that begin with a piece.
_BEGINS = _RNG.random((B, T)) < np.linspace(0, 0.3, B)[:, None]
_BEGINS[:, 0], _BEGINS[1, 24] = True, True
FIRST = np.maximum.accumulate(np.where(_BEGINS, np.arange(T), 0), axis=1).astype(np.int32)


@cache
def _one_device(config: ModelConfig) -> tuple[float, Arrays]:
    return Step(config, Layout.of(weights_dtype="f32", compute_dtype="f32"), TOKENS, FIRST)()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (TWO_DELTAS, "context=2,fsdp=2,tensor=2,sequence_parallel=true"),
        (SELECTIVE, "context=2,fsdp=2,tensor=2,sequence_parallel=true"),
        (LIGHTNING, "context=2,data=2,tensor=2"),
        (LINEAR_UNIT, "context=4,tensor=2,sequence_parallel=true"),
        (SELECTIVE, "context=4,data=2,remat=matmuls"),
        (CONVOLUTION, "context=2,tensor=2,data=2,context_method=ulysses"),
        (DELTA_BY_ELEMENT, "context=4,tensor=2,context_method=ring,remat=matmuls"),
        (MAMBA, "context=4,tensor=2,sequence_parallel=true,remat=full"),
        (DELTA, "data=2,context=4,remat=full"),
        (DELTA, "context=2,fsdp=4,zero_context=true"),
        (MAMBA, "context=2,fsdp=2,tensor=2,context_method=ulysses"),
        (CONVOLUTION, "context=8"),
    ],
)
@pytest.mark.slow
def test_states_are_handed_on(config: ModelConfig, text: str) -> None:
    """Sums of decays that cancel differ by up to 2e-4 of the largest, as with split heads."""
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    result = Step(config, layout, TOKENS, FIRST)()
    assert_equal(config, result, _one_device(config), tolerance=5e-4)
