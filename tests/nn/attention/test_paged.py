"""Attention over pages: both of its forms against one sequence's own keys, in the order of its positions."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax._src.literals
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P
from tests.native.needed import needs_native

from meshwright.cost.record_inference import cache_bytes
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import why_no_paged
from meshwright.models.count import cache_windows
from meshwright.models.layer_kinds import Window
from meshwright.models.presets import PRESETS
from meshwright.nn.attention import over_pages, paged, paged_kernel
from meshwright.nn.attention.by_formula import ScoreForm
from meshwright.nn.attention.over_pages import Asked, PagedKeys, gathered, in_blocks, natively, page_by_page
from meshwright.nn.attention.pools import abstract_pools, values_of
from meshwright.nn.products.quantised import Quantised, quantise
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.platforms import CPU, GPU, PLATFORMS, TPU

PAGE, NUM_PAGES, K, G, H = 4, 9, 2, 3, 6
RANDOM = np.random.default_rng(0)
POOLS = [jnp.asarray(RANDOM.normal(size=(NUM_PAGES, K, PAGE, H)), jnp.float32) for _ in range(2)]
# Two rows of three queries: one in the middle of its third page, one whose last query is padding.
TABLES = np.array([[5, 2, 7], [8, 1, 0]])
POSITIONS = np.array([[8, 9, 10], [4, 5, paged.PADDING]])
QUERIES = jnp.asarray(RANDOM.normal(size=(2, 3, K * G, H)), jnp.float32)


def expected(window: Window | None, how: ScoreForm, sinks: np.ndarray | None) -> np.ndarray:
    out = np.zeros(QUERIES.shape)
    for row, table in enumerate(TABLES):
        k, v = (np.concatenate([_wide(pool)[page] for page in table], axis=1) for pool in POOLS)
        for number, position in enumerate(row_positions(row)):
            begin = 0 if window is None else max(0, window.first(position))
            keys = np.arange(begin, position + 1)
            for head in range(K * G):
                scores = k[head // G, keys] @ _wide(QUERIES)[row, number, head] * how.scale
                if how.softcap:
                    scores = how.softcap * np.tanh(scores / how.softcap)
                if how.slopes:
                    scores = scores + how.slopes[head] * keys
                weights = np.exp(scores)
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
                out[row, number, head] = weights @ v[head // G, keys] / total
    return out


def _wide(array: Array) -> np.ndarray:
    return np.asarray(array, np.float64)


def _attended(
    form: Callable[..., Any], asked: Asked, pools: Any, window: Window | None, how: ScoreForm, *of_heads: Any
) -> Any:
    """The output of a form of attention, in one program: it compiles faster than its operations one by one.

    of_heads: sinks, then slopes.
    """

    def run(asked: Asked, pools: Any, *of_heads: Any) -> Any:
        return form(asked, PagedKeys(pools, window, how, *of_heads)).out

    return jax.jit(run)(asked, pools, *of_heads)


def row_positions(row: int) -> list[int]:
    return [int(position) for position in POSITIONS[row] if position != paged.PADDING]


@pytest.mark.parametrize("form", [page_by_page, gathered, in_blocks, natively])
@pytest.mark.parametrize(
    ("window", "how", "has_sinks"),
    [
        (None, ScoreForm(0.5), False),
        (Window(3), ScoreForm(0.5, 2.0), False),
        (Window(5), ScoreForm(0.4, slopes=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)), True),
        (Window(5, chunked=True), ScoreForm(0.5), False),  # of which one begins within each row
    ],
)
def test_a_query_reads_its_own_pages_up_to_its_position(form, window, how, has_sinks):
    if form is natively:
        needs_native()
        if has_sinks:
            return  # which it leaves to the others, as it does slopes
    sinks = np.linspace(-1, 1, K * G).astype(np.float32) if has_sinks else None
    slopes = None if how.slopes is None else jnp.asarray(how.slopes, jnp.float32)
    # What stands behind a sequence may be of one that failed.
    pools = [pool.at[7, :, 3].set(jnp.nan) for pool in POOLS]
    asked = Asked(QUERIES, jnp.asarray(POSITIONS, jnp.int32), jnp.asarray(TABLES, jnp.int32))
    given = None if sinks is None else jnp.asarray(sinks)
    found = np.asarray(_attended(form, asked, pools, window, how, given, slopes))
    seen = POSITIONS >= 0
    np.testing.assert_allclose(found[seen], expected(window, how, sinks)[seen], atol=1e-5)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("form", [page_by_page, in_blocks])
@pytest.mark.parametrize("window", [None, Window(50), Window(64, chunked=True)])
@pytest.mark.parametrize("last", [146, 127, 30])
def test_a_long_row_reads_several_pages_at_a_time(form, window, last):
    """37 pages of four positions: groups of eight, and the rest, of which a window begins in the middle."""
    pools = [jnp.asarray(RANDOM.normal(size=(40, K, PAGE, H)), jnp.float32) for _ in range(2)]
    tables = jnp.asarray(RANDOM.permutation(40)[None, :37], jnp.int32)
    unread = tables[0, last // PAGE + 1 :]
    pools = [pool.at[unread].set(jnp.nan) for pool in pools]
    positions = jnp.asarray([[last - 1, last]], jnp.int32)
    asked = Asked(QUERIES[:1, :2], positions, tables)
    together = _attended(form, asked, pools, window, ScoreForm(0.5))
    one_by_one = _attended(gathered, asked, [jnp.nan_to_num(pool) for pool in pools], window, ScoreForm(0.5))
    np.testing.assert_allclose(together, one_by_one, atol=2e-6)
    assert not np.isnan(together).any()


@pytest.mark.parametrize(
    ("window", "num_pages"), [(Window(8), 3), (Window(11), 4), (Window(12, chunked=True), 4)]
)
def test_a_row_gathers_only_the_pages_of_its_window(window: Window, num_pages: int) -> None:
    """Of 37 pages; one row ends with its table, and one is padding."""
    pools = [jnp.asarray(RANDOM.normal(size=(40, K, PAGE, H)), jnp.float32) for _ in range(2)]
    tables = jnp.asarray([RANDOM.permutation(40)[:37] for _ in range(5)], jnp.int32)
    positions = jnp.asarray([[2], [40], [95], [147], [paged.PADDING]], jnp.int32)
    q = jnp.asarray(RANDOM.normal(size=(5, 1, K * G, H)), jnp.float32)
    asked = Asked(q, positions, tables)
    assert over_pages._of_window(asked, window, PAGE)[0].shape == (5, num_pages)
    found = _attended(gathered, asked, pools, window, ScoreForm(0.5))
    wanted = _attended(page_by_page, asked, pools, window, ScoreForm(0.5))
    np.testing.assert_allclose(found[:4], wanted[:4], atol=1e-5)
    assert np.isfinite(found).all()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pallas's kernels run in JAX, whose rule of stores wants a shape of numbers, too (0.10.2)."""
    monkeypatch.setattr(pallas, "pallas_call", partial(pallas.pallas_call, interpret=True))
    monkeypatch.setattr(jax._src.literals.TypedInt, "shape", (), raising=False)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (Window(3), 2.0)])
@pytest.mark.parametrize("most_pages", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_the_kernel_of_tpus_finds_what_gathered_tables_do(
    window: Window | None, softcap: float | None, most_pages: int, interpreted, monkeypatch
) -> None:
    """Heads fill lanes. A third row is padding alone; rows are also taken one at a time."""
    monkeypatch.setattr(paged_kernel, "_MOST_PAGES", most_pages)
    k, v = (_normal(NUM_PAGES, K, PAGE, 128).at[7, :, 3].set(jnp.nan) for _ in range(2))
    tables = jnp.asarray([*TABLES, [3, 4, 6]], jnp.int32)
    positions = jnp.asarray([*POSITIONS, [paged.PADDING] * 3], jnp.int32)
    q, how = _normal(3, 3, K * G, 128), ScoreForm(0.1, softcap)
    kv = jnp.reshape(jnp.stack([k, v], axis=2), (NUM_PAGES, 2 * K, PAGE, 128)).swapaxes(1, 2)
    found = np.asarray(paged_kernel.ragged(q, positions, tables, kv, window, how))
    wanted = gathered(Asked(q, positions, tables), PagedKeys([k, v], window, how)).out
    seen = np.asarray(positions) >= 0
    np.testing.assert_allclose(found[seen], np.asarray(wanted)[seen], atol=1e-5)
    assert (found[~seen] == 0).all()


@pytest.mark.parametrize(("at_once", "group"), [(1, G), (256, G), (256, 4)])
@pytest.mark.parametrize("dtype", ["f32", "int8"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_kernel_of_gpus_finds_what_gathered_tables_do(
    dtype: str, softcap: float | None, at_once: int, group: int, monkeypatch
) -> None:
    """Rows of one query: in the middle of a seventh page, of a third, and of padding alone.

    A sequence is taken whole, or in as many parts as the GPU has capacity for. Later positions are NaN.
    """
    monkeypatch.setattr(paged_kernel, "_AT_ONCE", at_once)
    monkeypatch.setattr(paged_kernel, "_POSITIONS_OF_BLOCK", 16)
    k, v = (_normal(40, K, 16, 32) for _ in range(2))
    pools = [quantise(x, dtype, 1, 1) if dtype == "int8" else x for x in (k, v)]
    tables = jnp.asarray(RANDOM.permutation(40)[:21].reshape(3, 7), jnp.int32)
    positions = jnp.asarray([[100], [37], [paged.PADDING]], jnp.int32)
    q, how = _normal(3, 1, K * group, 32), ScoreForm(0.1, softcap)
    wanted = gathered(Asked(q, positions, tables), PagedKeys(pools, None, how)).out
    values = [values_of(pool) for pool in pools]
    if dtype == "f32":
        values = [value.at[tables[0, 6], :, 5:].set(jnp.nan) for value in values]
    scales = [pool.scales for pool in pools if isinstance(pool, Quantised)]
    found = paged_kernel.decoded(q, positions, tables, values, scales or None, how, interpret=True)
    np.testing.assert_allclose(found[:2], wanted[:2], atol=1e-5)
    assert np.isfinite(found).all()


def test_pools_of_the_kernel_keep_what_is_written(interpreted, monkeypatch) -> None:
    """Two replicas of a row of three tokens and two of one each, heads split in two: as in other pools."""
    config = replace(PRESETS["llama-3-8b"], d_head=128, num_heads=4, num_kv_heads=2, num_layers=1)
    layout = Layout.of(data=2, tensor=2, compute_dtype="f32", kv_dtype="f32").at("generate")
    mesh = device_mesh(layout, jax.devices()[:4])
    rows = paged.Rows(1, 3), paged.Rows(2, 1)
    positions = np.array([[4, 5, paged.PADDING, 2, 0], [0, 1, 2, paged.PADDING, 3]]).ravel()
    tables = np.array([[[5, 2]], [[1, 0]], [[3, 7]]] * 2)
    q, k, v = (np.asarray(_normal(10, heads, 128)) for heads in (4, 2, 2))
    outs = []
    for has_kernel in (True, False):
        monkeypatch.setattr("meshwright.nn.attention.pools._joins_heads", lambda *_, has=has_kernel: has)
        types = abstract_pools(config, layout, mesh, [2 * 8], PAGE)
        assert set(types) == ({"kv"} if has_kernel else {"k", "v"})

        def run(
            q: Array, k: Array, v: Array, where: Array, tables: Array, types=types, has=has_kernel
        ) -> Array:
            pools = jax.tree.map(_zeros, types)
            cache = paged.PagedCache(pools, where, tables, rows, layout, (0,), with_kernel=has)
            return cache.written(0, {"k": k, "v": v}).attend(0, q, None, ScoreForm(0.1), None)

        with jax.set_mesh(mesh):
            by_row = P("data"), P("data", None, None)
            split = [jax.device_put(x, P("data", "tensor", None)) for x in (q, k, v)]
            at = [jax.device_put(x.astype(np.int32), by_row[x.ndim == 3]) for x in (positions, tables)]
            outs.append(np.asarray(jax.jit(run)(*split, *at)))
    seen = positions >= 0
    np.testing.assert_allclose(outs[0][seen], outs[1][seen], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "degrees", "why"),
    [
        ("llama-3-8b", {"tensor": 8}, None),
        ("llama-3-8b", {"tensor": 8, "kv_dtype": "int8"}, "keys are in int8, queries in bf16"),
        ("gpt2", {}, "its heads are of 128, the model's of 64"),
        ("llama-2-13b", {"tensor": 8}, "5 KV heads on a device do not fill tiles"),
        ("gemma-2-27b", {"tensor": 8}, None),
    ],
)
def test_what_the_kernel_of_tpus_takes(name: str, degrees: dict, why: str | None) -> None:
    assert why_no_paged(TPU, PRESETS[name], Layout.of(**degrees).at("generate"), 64) == why


@pytest.mark.parametrize(
    ("name", "queries", "why"),
    [
        ("llama-3-8b", 1, None),
        ("llama-3-8b", 64, "it takes rows of one query, not of 64"),
        ("gemma-2-27b", 1, "layers have windows"),
        ("phi-3.5-mini", 1, "heads of 96 are no power of two"),
    ],
)
def test_what_the_kernel_of_gpus_takes(name: str, queries: int, why: str | None) -> None:
    layout = Layout.of(kv_dtype="int8").at("generate")
    assert why_no_paged(GPU, PRESETS[name], layout, queries) == why


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
@pytest.mark.parametrize(("name", "why"), [("gpt-oss-20b", "attention sinks"), ("deepseek-v3", "latents")])
def test_what_no_kernel_takes(kind: str, name: str, why: str) -> None:
    assert why_no_paged(PLATFORMS[kind], PRESETS[name], Layout.of()) == f"the model has {why}"
    assert why_no_paged(CPU, PRESETS["llama-3-8b"], Layout.of()) == "CPUs have none"


def _zeros(x: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding)


def _normal(*shape: int) -> Array:
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3"])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_plans_count_every_byte_of_a_quantised_cache(name: str, kv_dtype: str):
    """Eight pages of 64 positions in each layer hold what a plan counts of eight sequences of 64."""
    config = PRESETS[name]
    layout = Layout.of(tensor=2, kv_dtype=kv_dtype)
    mesh = device_mesh(layout, jax.devices()[:2])
    pools = abstract_pools(config, layout, mesh, [8] * len(cache_windows(config)), 64)
    stored = sum(
        array.dtype.itemsize * prod(array.sharding.shard_shape(array.shape))
        for array in jax.tree.leaves(pools)
    )
    assert cache_bytes(config, layout.at("generate"), 8, 64) == stored
