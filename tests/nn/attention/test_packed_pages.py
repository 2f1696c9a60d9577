"""Pools with several positions in a row have the same positions and attention as plain pools."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.layout import Layout
from meshwright.models.config_tables import MLA
from meshwright.models.layer_kinds import Window
from meshwright.models.presets import PRESETS
from meshwright.nn.attention import paged
from meshwright.nn.attention.by_formula import ScoreForm
from meshwright.nn.attention.over_pages import Asked, PagedKeys, gathered
from meshwright.nn.attention.packed_pages import Packed
from meshwright.nn.attention.pools import abstract_pools
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.platforms import CPU

K, G, WIDTH, PAGE, NUM_PAGES = 2, 3, 32, 16, 12


def _random(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _zeros(x: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding)


def _packed(pool: Array, together: int = 4) -> Packed:
    rows = pool.reshape(*pool.shape[:-2], pool.shape[-2] // together, together * pool.shape[-1])
    return Packed(rows, pool.shape[-1])


def test_rows_hold_the_positions_that_are_written() -> None:
    """Five tokens, two of them in one row; the page of the last is out of range, as of padding."""
    pool, new = _random(0, NUM_PAGES, K, PAGE, WIDTH), _random(1, 5, K, WIDTH)
    pages, places = jnp.asarray([3, 3, 0, 7, NUM_PAGES]), jnp.asarray([5, 6, 15, 0, 2])
    packed = _packed(pool).written(pages, places, new)
    expected = pool.at[pages, :, places].set(new, mode="drop")
    np.testing.assert_array_equal(packed.page(jnp.arange(NUM_PAGES)), expected)


def test_latents_are_read_position_by_position() -> None:
    pool, pages, places = _random(0, NUM_PAGES, PAGE, WIDTH), jnp.asarray([3, 3, 0]), jnp.asarray([5, 6, 15])
    np.testing.assert_array_equal(_packed(pool).position(pages, places), pool[pages, places])
    new = _random(1, 3, WIDTH)
    written = _packed(pool).written(pages, places, new)
    np.testing.assert_array_equal(written.position(pages, places), new)


@pytest.mark.parametrize("window", [None, Window(20)])
@pytest.mark.parametrize("apart", [False, True], ids=["both packed", "keys only"])
def test_attention_reads_packed_pools(window: Window | None, apart: bool) -> None:
    """Rows of one query in the middle of a fifth page and of a second; later positions are NaN."""
    k, v = (_random(seed, NUM_PAGES, K, PAGE, WIDTH) for seed in (0, 1))
    tables = jnp.asarray(np.random.default_rng(2).permutation(NUM_PAGES)[:10].reshape(2, 5), jnp.int32)
    v = v.at[tables[0, 4], :, 5:].set(jnp.nan)
    asked = Asked(_random(3, 2, 1, K * G, WIDTH), jnp.asarray([[68], [17]], jnp.int32), tables)
    how, sinks = ScoreForm(0.1), _random(4, K * G)
    attended = jax.jit(lambda pools: gathered(asked, PagedKeys(pools, window, how, sinks)).out)
    plain, packed = (attended(pools) for pools in ([k, v], [_packed(k), v if apart else _packed(v)]))
    assert np.isfinite(plain).all()
    np.testing.assert_allclose(packed, plain, rtol=1e-5, atol=1e-6)


_HEADS = {"d_head": WIDTH, "num_heads": 4, "num_kv_heads": 2, "num_layers": 1}
_LATENTS = {
    "d_head": WIDTH,
    "num_heads": 4,
    "num_kv_heads": 4,
    "num_layers": 1,
    "mla": MLA(kv_rank=64, nope_dim=16, rope_dim=16, value_dim=16),
}


@pytest.mark.parametrize("positions_split", [False, True])
@pytest.mark.parametrize("sizes", [_HEADS, _LATENTS], ids=["heads", "latents"])
def test_pools_keep_what_is_written(sizes: dict, positions_split: bool, monkeypatch) -> None:
    """Two replicas of a row of three tokens and two of one each; also with positions split over devices."""
    config = replace(PRESETS["llama-3-8b"], **sizes)
    words = {"kv_replicas": 2, "cache": "sequence"} if positions_split else {"tensor": 2}
    layout = Layout.of(data=2, compute_dtype="f32", kv_dtype="f32", **words).at("generate")
    mesh = device_mesh(layout, jax.devices()[:4])
    rows = paged.Rows(1, 3), paged.Rows(2, 1)
    positions = np.array([[4, 5, paged.PADDING, 2, 0], [0, 1, 2, paged.PADDING, 3]]).ravel()
    tables = np.array([[[5, 2]], [[1, 0]], [[3, 7]]] * 2)
    widths = {"latent": 64, "rope": 16} if config.mla else {"k": WIDTH, "v": WIDTH}
    query = sum(widths.values()) if config.mla else WIDTH
    q = np.asarray(_random(0, 10, 4, query))
    new = {
        name: np.asarray(_random(1, 10, *([] if config.mla else [2]), width))
        for name, width in widths.items()
    }
    outs = []
    for lanes in (1, 4 * min(widths.values())):
        monkeypatch.setattr(
            "meshwright.nn.attention.pools.platform_of", lambda _, at=lanes: replace(CPU, lanes=at)
        )
        types = abstract_pools(config, layout, mesh, [2 * 8], 8)
        num_packed = sum(isinstance(pool, Packed) for pools in types.values() for pool in pools)
        assert num_packed == (0 if lanes == 1 else 1 if config.mla else 2)

        def run(q: Array, new: dict, where: Array, tables: Array, types=types) -> Array:
            pools = jax.tree.map(_zeros, types)
            cache = paged.PagedCache(pools, where, tables, rows, layout, (0,))
            return cache.written(0, new).attend(0, q, None, ScoreForm(0.1), None)

        with jax.set_mesh(mesh):
            by_row = P("data"), P("data", None, None)
            axis = "kv_replicas" if positions_split else "tensor"
            heads = P("data", None) if config.mla else P("data", None if positions_split else axis, None)
            split = {name: jax.device_put(x, heads) for name, x in new.items()}
            at = [jax.device_put(x.astype(np.int32), by_row[x.ndim == 3]) for x in (positions, tables)]
            of_q = jax.device_put(q, P("data", axis, None))
            outs.append(np.asarray(jax.jit(run)(of_q, split, *at)))
    seen = positions >= 0
    np.testing.assert_allclose(outs[1][seen], outs[0][seen], rtol=1e-5, atol=1e-6)
