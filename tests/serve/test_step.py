"""Prefill and generation of a whole batch: on every layout the logits and caches of one device."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.nn.test_layouts import TINY

from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.nn.params import init_params
from meshwright.serve.step import InferenceStep

B, S = 8, 16
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (B, S), dtype=np.int32)
# Float32 sums in another order; the differences seen are at most 2e-6 of logits near 4.
TOLERANCE = 1e-5


def _layout(text: str) -> Layout:
    return Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")


def _run(step: InferenceStep, cache: Any, *rows: np.ndarray) -> tuple[np.ndarray, Any]:
    abstract_params, _, *shapes = step.abstract_arguments()
    params = init_params(TINY, step.layout, step.mesh, seed=0)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == jax.tree.map(
        lambda leaf: leaf.sharding, abstract_params
    )
    placed = [
        jax.device_put(np.asarray(x, np.int32), shape.sharding) for x, shape in zip(rows, shapes, strict=True)
    ]
    with jax.set_mesh(step.mesh):
        logits, cache = jax.block_until_ready(step.jitted(params, cache, *placed))
    return np.asarray(logits), cache


def _prefill_then_generate(layout: Layout) -> list[np.ndarray]:
    """Logits after all but the last token, and after that one too; and the keys that then stand there."""
    workload = Workload(B, S)
    prefill = InferenceStep(TINY, layout, workload, "prefill")
    generate = InferenceStep(TINY, layout, workload, "generate")
    lengths, last = np.full(B, S - 1), np.full((B, 1), S - 1)
    positions = np.broadcast_to(np.arange(S), (B, S))
    with jax.set_mesh(prefill.mesh):
        empty = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec),
            prefill.abstract_cache(),
        )
    first, cache = _run(prefill, empty, TOKENS, positions, lengths)
    second, cache = _run(generate, cache, TOKENS[:, -1:], last, np.ones(B))
    return [first, second, np.asarray(cache["k"])]


@cache
def _one_device() -> list[np.ndarray]:
    return _prefill_then_generate(_layout("data=1"))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["data=2,tensor=4", "data=8", "tensor=4", "data=2,fsdp=2,tensor=2"])
def test_a_batch_agrees_with_one_device(text: str) -> None:
    found = _prefill_then_generate(_layout(text))
    for mine, expected in zip(found, _one_device(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_positions_are_whole() -> None:
    with pytest.raises(LayoutError) as error:
        InferenceStep(TINY, Layout.of(context=2), Workload(B, S), "generate")
    assert str(error.value) == (
        "layout context=2,remat=none: inference splits over data, fsdp and tensor; leave out context=2"
    )
