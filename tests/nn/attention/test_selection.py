"""An indexer's choice: the keys of the highest scores, over whole sequences and over pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.layout import Layout
from meshwright.models.at_layer import Places
from meshwright.models.config_tables import Indexer
from meshwright.nn.attention import paged_selection
from meshwright.nn.attention.paged_selection import (
    NOT_CHOSEN,
    attend_to_blocks,
    attend_to_chosen,
    best_of_tables,
    best_positions,
)
from meshwright.nn.attention.selection import choose, highest, index_scores
from meshwright.nn.start.device_mesh import device_mesh

LAYOUT = Layout.of()
INDEXER = Indexer(3, 4, 5)
BLOCKS = Indexer(3, 4, 12, weighted=False, normed="both", block=4, local_blocks=1)
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
        run = jax.jit(lambda q, k, weights: choose(q, k, weights, places, places, INDEXER, LAYOUT))
        chosen = run(*map(jnp.asarray, (q, k, weights)))
    expected = best_of(scores_of(q, k, weights), positions, segments if num_documents > 1 else None)
    np.testing.assert_array_equal(chosen, expected)


def blocks_of(scores: np.ndarray, positions: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """bool[B, T, K, blocks] by sorting blocks by their best visible key of scores[B, T, K, S]."""
    size, count = BLOCKS.block_size, BLOCKS.top_k // BLOCKS.block_size
    chosen = np.zeros((*scores.shape[:3], -(-scores.shape[3] // size)), bool)
    for b, t, k in np.ndindex(*scores.shape[:3]):
        seen = (positions[b] <= positions[b, t]) & (segments[b] == segments[b, t])
        best = {
            number: scores[b, t, k, seen & (positions[b] // size == number)].max()
            for number in range(int(positions[b, t]) // size + 1)
        }
        best[int(positions[b, t]) // size] = np.inf
        chosen[b, t, k, sorted(best, key=lambda number: -best[number])[:count]] = True
    return chosen


@pytest.mark.parametrize("num_documents", [1, 3])
def test_each_kv_head_reads_its_best_blocks(num_documents: int) -> None:
    """Blocks of positions of a document, which may begin within eight keys that are scored together."""
    q, k = random(0, B, T, X, Y), random(1, B, T, Y)
    segments = np.broadcast_to(np.arange(T) * num_documents // T, (B, T)).astype(np.int32)
    first = np.argmax(segments[:, :, None] == segments[:, None], axis=2)
    positions = (np.broadcast_to(np.arange(T), (B, T)) - first).astype(np.int32)
    places = Places(jnp.asarray(positions), jnp.asarray(segments) if num_documents > 1 else None)
    with jax.set_mesh(device_mesh(LAYOUT)):
        run = jax.jit(lambda q, k: choose(q, k, None, places, places, BLOCKS, LAYOUT))
        chosen = run(*map(jnp.asarray, (q, k)))
    expected = blocks_of(np.einsum("BTKy,BSy->BTKS", q, k), positions, segments)
    np.testing.assert_array_equal(chosen, expected)


def test_pages_hold_the_same_blocks() -> None:
    """Pages of a size that blocks do not divide, in any order; the first queries see only some blocks."""
    q, k, page = random(0, 1, T, X, Y), random(1, 1, T, Y), 2
    table = np.random.default_rng(3).permutation(T // page).astype(np.int32)
    pool = np.zeros((T // page, page, Y), np.float32)
    pool[table] = k.reshape(-1, page, Y)
    positions = np.arange(T, dtype=np.int32)[None]

    def read(pages: jax.Array) -> jax.Array:
        return jnp.reshape(jnp.asarray(pool)[pages], (*pages.shape[:-1], -1, Y))

    of_q, places, tables = (jnp.asarray(x) for x in (q, positions, table[None]))
    at = best_positions(of_q, None, places, tables, read, page, BLOCKS)[0]
    rows = jnp.repeat(tables, T, axis=0)
    alone = best_of_tables(of_q[0], None, places[0], rows, read, BLOCKS)
    expected = blocks_of(np.einsum("BTKy,BSy->BTKS", q, k), positions, np.zeros_like(positions))[0]
    for t, head in np.ndindex(T, X):
        numbers = set(np.flatnonzero(expected[t, head]))
        assert set(np.asarray(at[t, head])) - {NOT_CHOSEN} == numbers
        assert set(np.asarray(alone[t, head])) - {NOT_CHOSEN} == numbers


def test_attention_reads_the_positions_of_chosen_blocks() -> None:
    """Two KV heads of two query heads each; positions after the query, and of other blocks, hold NaN."""
    k, v, q, page = random(4, 4, 2, 2, 6), random(5, 4, 2, 2, 3), random(6, 1, 2, 2, 6), 2
    table = jnp.asarray([[2, 0, 3, 1]], jnp.int32)
    chosen, position = jnp.asarray([[[0, 1], [1, NOT_CHOSEN]]], jnp.int32), jnp.asarray([6], jnp.int32)
    k[1, :, 1] = v[1, :, 1] = np.nan  # position 7
    k[2, 1], v[0, 1] = np.nan, np.nan  # block 0 of head 1
    pools = jnp.asarray(k), jnp.asarray(v)
    out = attend_to_blocks(
        jnp.asarray(q), chosen, position, table, lambda at: (pools[0][at], pools[1][at]), page, 4, 0.5
    )
    places = {0: [(2, 0), (2, 1), (0, 0), (0, 1), (3, 0), (3, 1), (1, 0)], 1: [(3, 0), (3, 1), (1, 0)]}
    for head, at in places.items():
        keys, values = (np.stack([x[page, head, place] for page, place in at]) for x in (k, v))
        shares = np.exp(0.5 * q[0, head] @ keys.T)
        expected = shares / shares.sum(-1, keepdims=True) @ values
        np.testing.assert_allclose(out[0, head], expected, rtol=1e-5)


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

    at = best_positions(of_q, of_weights, places, tables, read, PAGE, INDEXER)
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
    by_pages = best_positions(of_q, of_weights, at, of_rows, read, PAGE, INDEXER)[:, 0]
    best = best_of_tables(of_q[:, 0], of_weights[:, 0], at[:, 0], of_rows, read, INDEXER)
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
