"""An indexer's choice: the keys of the highest scores, over whole sequences and over pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.layout import Layout
from meshwright.models.transformer import Places
from meshwright.nn.attention import paged_selection
from meshwright.nn.attention.paged_selection import (
    NOT_CHOSEN,
    attend_to_chosen,
    best_of_tables,
    best_positions,
)
from meshwright.nn.attention.selection import choose, highest, index_scores
from meshwright.nn.start.device_mesh import device_mesh

LAYOUT = Layout.of()
B, T, X, Y, TOP, PAGE = 2, 32, 3, 4, 5, 4


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def scores_of(q: np.ndarray, k: np.ndarray, weights: np.ndarray) -> np.ndarray:
    products = np.maximum(np.einsum("BTxy,BSy->BTxS", q, k), 0)
    return np.einsum("BTx,BTxS->BTS", weights, products)


def best_of(scores: np.ndarray, positions: np.ndarray, segments: np.ndarray | None = None) -> np.ndarray:
    """bool[B, T, S] by sorting: of equal scores the first position comes first."""
    chosen = np.zeros(scores.shape, bool)
    for b, t in np.ndindex(*scores.shape[:2]):
        seen = positions[b] <= positions[b, t]
        seen &= True if segments is None else segments[b] == segments[b, t]
        order = sorted(np.flatnonzero(seen), key=lambda s: (-scores[b, t, s], s))
        chosen[b, t, order[:TOP]] = True
    return chosen


@pytest.mark.parametrize("num_documents", [1, 3])
def test_each_query_reads_its_best_visible_keys(num_documents: int) -> None:
    q, k, weights = random(0, B, T, X, Y), random(1, B, T, Y), random(2, B, T, X)
    segments = np.broadcast_to(np.arange(T) * num_documents // T, (B, T)).astype(np.int32)
    positions = np.broadcast_to(np.arange(T), (B, T)).astype(np.int32)
    places = Places(jnp.asarray(positions), jnp.asarray(segments) if num_documents > 1 else None)
    with jax.set_mesh(device_mesh(LAYOUT)):
        run = jax.jit(lambda q, k, weights: choose(q, k, weights, places, places, TOP, LAYOUT))
        chosen = run(*map(jnp.asarray, (q, k, weights)))
    expected = best_of(scores_of(q, k, weights), positions, segments if num_documents > 1 else None)
    np.testing.assert_array_equal(chosen, expected)


def test_the_first_of_equal_scores_are_chosen() -> None:
    scores = jnp.asarray([[[1.0, 0.0, 2.0, 0.0, 0.0, -jnp.inf], [-jnp.inf] * 6]])
    assert highest(scores, 3).tolist() == [[[True, True, True, False, False, False], [False] * 6]]
    assert highest(scores, 9).sum() == 5


def test_pages_hold_the_same_choice() -> None:
    """The sequence lies in shuffled pages; its first queries see fewer than `top_k` positions."""
    q, k, weights = random(0, 1, T, X, Y), random(1, 1, T, Y), random(2, 1, T, X)
    table = np.random.default_rng(3).permutation(T // PAGE).astype(np.int32)
    pool = np.zeros((T // PAGE, PAGE, Y), np.float32)
    pool[table] = k.reshape(-1, PAGE, Y)
    positions = np.arange(T, dtype=np.int32)[None]
    of_q, of_weights, places, tables = (jnp.asarray(x) for x in (q, weights, positions, table[None]))

    def read(pages: jax.Array) -> jax.Array:
        return jnp.reshape(jnp.asarray(pool)[pages], (-1, Y))

    at = best_positions(of_q, of_weights, places, tables, read, PAGE, TOP)
    expected = best_of(scores_of(q, k, weights), positions)[0]
    for t in range(T):
        assert set(np.asarray(at[0, t])) - {NOT_CHOSEN} == set(np.flatnonzero(expected[t]))


@pytest.mark.parametrize("at_once", [T, 1 << 17], ids=["row by row", "together"])
def test_rows_of_one_query_choose_the_same_from_their_tables(at_once: int, monkeypatch) -> None:
    """Three rows at different positions of two sequences; a page after the last holds NaN."""
    monkeypatch.setattr(paged_selection, "KEYS_AT_ONCE", at_once)
    q, k, weights = random(0, 3, 1, X, Y), random(1, 2, T, Y), random(2, 3, 1, X)
    k[1, T - PAGE :] = np.nan
    tables = np.random.default_rng(3).permutation(2 * T // PAGE).astype(np.int32).reshape(2, -1)
    pool = np.zeros((2 * T // PAGE, PAGE, Y), np.float32)
    pool[tables] = k.reshape(2, -1, PAGE, Y)
    rows, positions = np.array([0, 1, 1]), np.array([[T - 1], [TOP - 3], [T - PAGE - 1]], np.int32)

    def read(pages: jax.Array) -> jax.Array:
        return jnp.asarray(pool)[pages].reshape(*pages.shape[:-1], -1, Y)

    of_q, of_weights, at, of_rows = (jnp.asarray(x) for x in (q, weights, positions, tables[rows]))
    by_pages = best_positions(of_q, of_weights, at, of_rows, read, PAGE, TOP)[:, 0]
    best = best_of_tables(of_q[:, 0], of_weights[:, 0], at[:, 0], of_rows, read, TOP)
    assert [set(map(int, row)) for row in best] == [set(map(int, row)) for row in by_pages]
    assert {NOT_CHOSEN} < set(map(int, best[1]))


def test_attention_reads_the_chosen_latents_alone() -> None:
    latents, ropes, q = random(4, 2, PAGE, 6), random(5, 2, PAGE, 2), random(6, 1, 3, 8)
    latents[1, 3] = np.nan  # of a position that was not chosen
    chosen, table = jnp.asarray([[0, 5, NOT_CHOSEN]], jnp.int32), jnp.asarray([[1, 0]], jnp.int32)
    pools = jnp.asarray(latents), jnp.asarray(ropes)
    out = attend_to_chosen(jnp.asarray(q), chosen, table, lambda at: (pools[0][at], pools[1][at]), PAGE, 0.5)
    values = np.stack([latents[1, 0], latents[0, 1]])
    keys = np.concatenate([values, np.stack([ropes[1, 0], ropes[0, 1]])], axis=-1)
    shares = np.exp(0.5 * q[0] @ keys.T)
    np.testing.assert_allclose(out[0], shares / shares.sum(-1, keepdims=True) @ values, rtol=1e-5)


def test_scores_weigh_the_positive_products_of_heads() -> None:
    q, k, weights = random(0, B, T, X, Y), random(1, B, T, Y), random(2, B, T, X)
    found = index_scores(*map(jnp.asarray, (q, k, weights)))
    np.testing.assert_allclose(found, scores_of(q, k, weights), rtol=1e-4, atol=1e-5)
