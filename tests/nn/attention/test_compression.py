"""Entries of compressed keys: against the sum of each window by hand, also in packed documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models.at_layer import Places
from meshwright.nn.attention.compression import NEVER, summed, windows_of

RATE = 3


def by_hand(values: np.ndarray, gates: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The entries [S, H] of one document's values and gates [T, c, H], entry by entry."""
    entries = []
    for start in range(0, len(values) - RATE + 1, RATE):
        own = slice(start, start + RATE)
        v, g = values[own, -1], gates[own, -1] + bias[:, -1]
        if bias.shape[1] == 2 and start:
            before = slice(start - RATE, start)
            v = np.concatenate([values[before, 0], v])
            g = np.concatenate([gates[before, 0] + bias[:, 0], g])
        weights = np.exp(g) / np.exp(g).sum(0)
        entries.append((weights * v).sum(0))
    return np.array(entries).reshape(-1, values.shape[-1])


@pytest.mark.parametrize("num_series", [1, 2])
@pytest.mark.parametrize("lengths", [[14], [5, 2, 7], [3, 3, 8]])
def test_entries_are_weighted_sums_of_their_positions(num_series: int, lengths: list[int]) -> None:
    """A document begins with an entry of its own, and its last positions may be in none."""
    random = np.random.default_rng(0)
    values, gates = random.normal(size=(2, 14, num_series, 4)).astype(np.float32)
    bias = random.normal(size=(RATE, num_series, 4)).astype(np.float32)
    ends = np.cumsum(lengths)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    segments = np.repeat(ends, lengths).astype(np.int32)
    places = Places(jnp.asarray(positions[None]), jnp.asarray(segments[None]) if len(lengths) > 1 else None)
    windows = windows_of(places, RATE)
    made = jax.jit(summed)(values[None], gates[None], bias, windows)[0]
    expected = [
        by_hand(values[end - n : end], gates[end - n : end], bias)
        for end, n in zip(ends, lengths, strict=True)
    ]
    counts = [len(entries) for entries in expected]
    num_entries = sum(counts)
    np.testing.assert_allclose(made[:num_entries], np.concatenate(expected), rtol=0, atol=1e-6)
    first = np.concatenate([np.arange(count) * RATE for count in counts])
    np.testing.assert_array_equal(windows.first[0, :num_entries], first)
    assert (windows.first[0, num_entries:] == NEVER).all()
    if windows.segments is not None:
        np.testing.assert_array_equal(windows.segments[0, :num_entries], np.repeat(ends, counts))
