"""Prefill and generation of a whole batch: on every layout the logits of one device."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from tests.nn.small_models import GPT, LATENT, MIXTURE, SHARED, TIED, TINY

from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.layout.layout_checks import num_replicas
from meshwright.layout.workload import InferencePhase, Workload
from meshwright.models.config import ModelConfig
from meshwright.nn.layer_weights import layered
from meshwright.nn.params import init_params
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.serve.device import programs
from meshwright.serve.device.cache_programs import CachePrograms, CacheSizes
from meshwright.serve.device.programs import InferencePrograms, workload_step

pytestmark = pytest.mark.sampled(5)

B, S = 8, 16
FEW = replace(TINY, num_kv_heads=2)
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (B, S), dtype=np.int32)
# Float32 sums in another order; the differences seen are at most 2e-6 of logits near 4.
TOLERANCE = 1e-5


def _layout(text: str) -> Layout:
    return Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")


def _run(
    layout: Layout,
    phase: InferencePhase,
    pools: Any,
    tokens: np.ndarray,
    positions: np.ndarray,
    config: ModelConfig = TINY,
) -> Any:
    """(logits, pools) of rows tokens[B, T] at positions[B, T], whose logits after the last are wanted."""
    step, (params, types, last, *others), mesh = workload_step(config, layout, Workload(B, S), phase)
    weights = layered(init_params(config, layout, mesh, seed=0), config, layout, mesh)
    jax.tree.map(lambda found, told: _check_type(found, told), weights, params)
    if pools is None:
        pools = jax.tree.map(
            lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), types
        )
    pages = np.arange(B) % (B // num_replicas(layout.at(phase), config))
    shards = layout.at(phase).num_batch_shards
    heads = np.arange(B // shards) * tokens.shape[1] + tokens.shape[1] - 1
    columns = (tokens, positions, np.zeros(tokens.size), pages, np.tile(heads, shards))
    prefill = layout.at("prefill")
    if phase == "prefill" and prefill.table.position_axes:
        columns = _prefilled_together(prefill, tokens, positions, others[3].shape)
    placed = [
        jax.device_put(np.asarray(x, np.int32).reshape(told.shape), told.sharding)
        for x, told in zip((np.zeros(last.shape), *columns), (last, *others), strict=True)
    ]
    with jax.set_mesh(mesh):
        logits, pools = step(weights, pools, *placed)
    logits = np.asarray(logits)
    if len(logits) > B:  # of every replica, of which those that prefill together have the same
        apart = np.reshape(
            logits, (prefill.num_batch_shards, -1, B // prefill.num_batch_shards, logits.shape[-1])
        )
        assert (apart == apart[:, :1]).all()
        logits = np.reshape(apart[:, 0], (B, -1))
    return logits, pools


def _prefilled_together(
    layout: Layout, tokens: np.ndarray, positions: np.ndarray, tables: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
    """The columns of a step in which replicas prefill prompts together, and each keeps as many of them."""
    shards = layout.num_batch_shards
    rows, replicas = B // shards, tables[0] // (B // shards)
    kept = rows * shards // replicas
    mine = np.full((replicas, rows, S), -1)
    pages = np.zeros((replicas, rows, *tables[1:]))
    for number in range(B):
        replica, row = number // kept, number % rows
        mine[replica, row], pages[replica, row] = positions[number], number % kept
    return tokens, mine, np.zeros(tokens.size), pages, np.full(B, S - 1)


def _check_type(found: jax.Array, told: jax.ShapeDtypeStruct) -> None:
    assert (found.shape, found.dtype, found.sharding) == (told.shape, told.dtype, told.sharding)


def _prefill_then_generate(layout: Layout, config: ModelConfig = TINY) -> list[np.ndarray]:
    """Logits after each prompt, and after the token that follows; the last position is written twice."""
    positions = np.broadcast_to(np.arange(S), (B, S))
    first, pools = _run(layout, "prefill", None, TOKENS, positions, config)
    second, _ = _run(layout, "generate", pools, TOKENS[:, :1], positions[:, -1:], config)
    return [first, second]


@pytest.mark.slow
def test_whole_prompts_attend_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a kernel takes them: the logits and pages of blocks."""
    positions = np.broadcast_to(np.arange(S), (B, S))
    expected, pools = _run(_layout("data=2"), "prefill", None, TOKENS, positions)
    monkeypatch.setattr(programs, "has_prompt_programs", lambda platform, layout: True)
    found, same = _run(_layout("data=2"), "prefill", None, TOKENS, positions)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    jax.tree.map(partial(np.testing.assert_allclose, atol=TOLERANCE), same, pools)


@cache
def _one_device(config: ModelConfig = TINY) -> list[np.ndarray]:
    return _prefill_then_generate(_layout("data=1"), config)


@pytest.mark.slow
@pytest.mark.parametrize("config", [LATENT, GPT, TIED, SHARED], ids=lambda config: config.name)
def test_other_models_in_two_dimensions(config: ModelConfig) -> None:
    """D over one axis, heads and F over the other: 2D weight-stationary."""
    found = _prefill_then_generate(_layout("tensor=2,tensor2=2"), config)
    for mine, expected in zip(found, _one_device(config), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "data=2,expert=2",
        "data=4,expert=4,tensor=2",
        "data=2,fsdp=2,expert=2",
        "data=2,tensor2=2,expert=2",
        "data=8,expert=8,expert_nodes=4,dispatch=once",
    ],
)
def test_experts_on_devices_of_their_own(text: str) -> None:
    found = _prefill_then_generate(_layout(text), MIXTURE)
    for mine, expected in zip(found, _one_device(MIXTURE), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("tensor=2,kv_replicas=2,cache=sequence", marks=pytest.mark.slow),
        pytest.param("data=2,tensor=2,kv_replicas=2,cache=batch", marks=pytest.mark.slow),
        pytest.param("data=2,tensor=2,kv_replicas=2,cache=sequence", marks=pytest.mark.slow),
        pytest.param("tensor=2,kv_replicas=4,cache=batch", marks=pytest.mark.slow),
        pytest.param("tensor=2,tensor2=2,kv_replicas=2,cache=batch", marks=pytest.mark.slow),
        pytest.param("tensor=2,tensor2=2,kv_replicas=2,cache=sequence", marks=pytest.mark.slow),
    ],
)
def test_a_cache_is_split_beyond_its_heads(text: str) -> None:
    """Generation behind pages that prefill in blocks has filled, by the same table of activations."""
    layout = _layout(text).at("generate")
    positions = np.broadcast_to(np.arange(S), (B, S))
    _, pools = _run(_layout("data=1"), "prefill", None, TOKENS, positions, FEW)
    whole = jax.tree.map(np.asarray, pools)
    _, (_, types, *_), _ = workload_step(FEW, layout, Workload(B, S), "generate")
    placed = jax.tree.map(lambda x, told: jax.device_put(x.reshape(told.shape), told.sharding), whole, types)
    assert "kv_replicas" in str(placed["k"][0].sharding.spec)
    found, _ = _run(layout, "generate", placed, TOKENS[:, :1], positions[:, -1:], FEW)
    expected = _one_device(FEW)[1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize(
    "text",
    [
        "data=2,tensor=4",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("data=8", "tensor=4", "data=2,fsdp=2,tensor=2", "data=2,tensor=2,tensor2=2")
        ),
    ],
)
def test_a_batch_agrees_with_one_device(text: str) -> None:
    for mine, expected in zip(_prefill_then_generate(_layout(text)), _one_device(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (FEW, "context=2,tensor=2,kv_replicas=2,cache=batch"),
        *(
            pytest.param(config, text, marks=pytest.mark.slow)
            for config, text in (
                (FEW, "context=2,tensor=2,kv_replicas=2,cache=sequence"),
                (TINY, "data=2,context=2,tensor=2,context_method=ring"),
                (TINY, "context=4,context_method=ulysses"),
                (TINY, "context=2,tensor=2,tensor2=2"),
                (LATENT, "context=2,tensor=2"),
                (SHARED, "context=2,tensor=2"),
                (SHARED, "context=2,tensor=2,context_method=ring"),
                (LATENT, "context=2,tensor=2,context_method=ring"),
                (GPT, "context=4,tensor=2"),
                (TIED, "fsdp=2,context=2,tensor=2"),
                (MIXTURE, "data=2,context=2,expert=2"),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_prompts_are_prefilled_by_position(config: ModelConfig, text: str) -> None:
    for mine, expected in zip(
        _prefill_then_generate(_layout(text), config), _one_device(config), strict=True
    ):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_sequences_divide_over_the_cache() -> None:
    with pytest.raises(LayoutError) as error:
        workload_step(FEW, _layout("tensor=2,kv_replicas=4,cache=batch"), Workload(6, S), "generate")
    assert str(error.value) == (
        "k[B_kv_replicas, S, K_tensor, H]: 6 sequences (B) do not divide over kv_replicas = 4; "
        "fits: 8 sequences"
    )


def test_tokens_are_on_all_devices_that_have_parts_of_heads() -> None:
    with pytest.raises(LayoutError) as error:
        workload_step(TINY, Layout.of(tensor=2, sequence_parallel=True), Workload(B, S), "generate")
    assert str(error.value) == (
        "layout tensor=2,sequence_parallel=true,remat=none: inference splits over data, fsdp, expert, "
        "context and tensor; leave out sequence_parallel=true"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.02), ("fp8", 0.1)])
def test_a_narrow_cache_costs_little(dtype: str, most: float) -> None:
    """Keys and values are off by half a step of their head's largest: a 254th in int8, a 16th in fp8."""
    found = _prefill_then_generate(_layout("tensor=2").replace(kv_dtype=dtype))
    for mine, expected in zip(found, _one_device(), strict=True):
        assert 0 < np.abs(mine - expected).max() < most * np.abs(expected).max()


@pytest.mark.parametrize("kv_dtype", ["f32", "int8"])
def test_pages_go_from_one_set_of_devices_to_another(kv_dtype: str):
    layout = _layout("tensor=2").replace(kv_dtype=kv_dtype).at("generate")
    here, there = (
        InferencePrograms(
            FEW,
            layout,
            device_mesh(layout, jax.devices()[first : first + 2]),
            CacheSizes(1, 4, 4),
        )
        for first in (0, 2)
    )
    random = np.random.default_rng(0)
    pools = jax.tree.map(
        lambda leaf: jax.device_put(random.integers(1, 99, leaf.shape).astype(leaf.dtype), leaf.sharding),
        here.cache.pools(),
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, there.cache.exported(2))
    no_states, no_page = np.zeros(1, np.int32), 4
    export, accept = CachePrograms(here.cache).export(2), CachePrograms(there.cache).accept(2)
    exported = jax.device_put(export(pools, np.array([3, 1], np.int32), no_states), shardings)
    found = accept(there.empty()[0], np.array([0, no_page], np.int32), no_states, exported)
    for pool, filled in zip(jax.tree.leaves(pools), jax.tree.leaves(found), strict=True):
        assert set(filled.devices()) == set(jax.devices()[2:4])
        np.testing.assert_array_equal(filled[0], pool[3])
        assert not np.asarray(filled)[1:].any()
