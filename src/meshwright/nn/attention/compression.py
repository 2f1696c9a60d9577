"""Entries of compressed keys: consecutive positions summed by a softmax of gates (DeepSeek-V4).

    entry[s] = sum over j of softmax(gate[j] + bias[j]) value[j]       j: the w positions of the entry

With two series, values and gates have two halves. An entry sums the second series of its own positions and
the first series of the w positions before, in one softmax of 2 w terms. A segment begins with an entry of its
own; positions after its last whole entry are in none. Source: DeepSeek-AI, "DeepSeek-V4", 2026, section 2.3.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.models.at_layer import Places

# The first position of an entry without tokens, so late that no query sees it.
NEVER = 1 << 30


class Windows(NamedTuple):
    """The w consecutive tokens that each entry sums.

    places: i32[B, S], the index in the row of an entry's first token; None if entry s begins at s w. first:
    i32[B, S], the position of that token. segments: i32[B, S], its document; None if a row is one document.
    """

    places: Array | None
    first: Array
    segments: Array | None


def windows_of(places: Places, rate: int) -> Windows:
    """The windows of the entries of each row, in order.

    A row of n tokens has n // rate entries. If it holds several documents, the last entries may be without
    tokens; they begin at NEVER.
    """
    count = places.positions.shape[1] // rate
    if places.segments is None:
        first = jnp.arange(count, dtype=jnp.int32) * rate
        return Windows(None, jnp.broadcast_to(first, (places.positions.shape[0], count)), None)
    is_last = (places.positions + 1) % rate == 0  # whether a token is the last of an entry
    last = jnp.argsort(~is_last, axis=1, stable=True)[:, :count]
    exists = jnp.take_along_axis(is_last, last, axis=1)
    starts = jnp.where(exists, last - rate + 1, 0)
    first = jnp.take_along_axis(places.positions, starts, axis=1)
    segments = jnp.take_along_axis(places.segments, starts, axis=1)
    return Windows(starts, jnp.where(exists, first, NEVER), segments)


def summed(values: Array, gates: Array, bias: Array, windows: Windows) -> Array:
    """entries[B, S, H] of values and gates [B, T, c, H] and bias[w, c, H]."""
    rate = bias.shape[0]
    v, g = (_of_entries(x, windows, rate) for x in (values, gates))
    run = jax.vmap(weighed, in_axes=(0, 0, None, 0))
    return run((v, _shifted(v)), (g, _shifted(g)), bias, windows.first >= rate)


def weighed(values: tuple[Array, Array], gates: tuple[Array, Array], bias: Array, has_before: Array) -> Array:
    """entries[S, H] of pairs of values and of gates [S, w, c, H].

    The second of a pair is of the w positions before an entry's own. has_before: bool[S], whether these are
    of the same segment.
    """
    (v, v_before), (g, g_before) = values, gates
    g = g.astype(jnp.float32) + bias[None]
    if bias.shape[1] == 1:
        v, g = v[..., 0, :], g[..., 0, :]
    else:
        before = g_before[..., 0, :].astype(jnp.float32) + bias[:, 0][None]
        before = jnp.where(has_before[:, None, None], before, -jnp.inf)
        v = jnp.concatenate([v_before[..., 0, :], v[..., 1, :]], axis=1)
        g = jnp.concatenate([before, g[..., 1, :]], axis=1)
    return jnp.sum(v * jax.nn.softmax(g, axis=1).astype(v.dtype), axis=1)


def _of_entries(x: Array, windows: Windows, rate: int) -> Array:
    """x[B, T, c, H] by entries: [B, S, w, c, H]."""
    count = windows.first.shape[1]
    if windows.places is None:
        return jnp.reshape(x[:, : count * rate], (x.shape[0], count, rate, *x.shape[2:]))
    places = windows.places[..., None] + jnp.arange(rate, dtype=jnp.int32)[None, None]
    return jax.vmap(lambda row, at: row[at])(x, places)


def _shifted(x: Array) -> Array:
    """x[B, S, ...] moved to the next entry; zeros for the first."""
    return jnp.pad(x[:, :-1], [(0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)])
