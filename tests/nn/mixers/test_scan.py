"""States of all positions of a chunk by a scan: Mamba's, with decays of each element, and RG-LRU's."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.mixers.recurrence import _ROW, Inputs, chunked

# (groups, heads of a group, elements of a key, columns of a value, whether rates are given). A piece of
# positions under context parallelism has two columns.
SIZES = [(1, 6, 4, 1, True), (1, 6, 4, 2, True), (3, 5, 1, 1, False), (3, 5, 1, 2, False)]


def _inputs(g: int, u: int, s: int, p: int, length: int, *, has_rates: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=(2, length, g, s)) for name in ("q", "k")}
    made |= {"v": rng.normal(size=(2, length, g, u, p)), "decay": -rng.uniform(size=(2, length, g, u))}
    if has_rates:
        made |= {"decay": -made["decay"], "log_rates": rng.normal(size=(g, u, s))}
    return made


@pytest.mark.parametrize(("g", "u", "s", "p", "has_rates"), SIZES)
def test_states_are_those_of_a_plain_recurrence(g: int, u: int, s: int, p: int, has_rates: bool) -> None:
    """In float64, position by position, with documents that end within chunks, from a state before them."""
    given = _inputs(g, u, s, p, 150, has_rates=has_rates)
    segments = np.zeros((2, 150), np.int32)
    segments[0, 70:], segments[1, 20:], segments[1, 100:] = 1, 1, 2
    first = np.random.default_rng(1).normal(size=(2, g, u, s, p))
    state, expected = first, np.zeros_like(given["v"])
    rates = -np.exp(given["log_rates"]) if has_rates else 1.0
    for t in range(150):
        state = state * (segments[:, t] == segments[:, max(t - 1, 0)])[:, None, None, None, None]
        kept = np.exp(given["decay"][:, t][..., None] * rates)
        state = kept[..., None] * state
        state = state + np.einsum("bgs,bgup->bgusp", given["k"][:, t], given["v"][:, t])
        expected[:, t] = np.einsum("bgs,bgusp->bgup", given["q"][:, t], state)
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}
    out, after = chunked(Inputs.of(arrays), jnp.asarray(segments), jnp.asarray(first, jnp.float32))
    for mine, plain in ((out, expected), (after, state)):
        np.testing.assert_allclose(mine, plain, rtol=0, atol=2e-5 * np.abs(plain).max())


@pytest.mark.parametrize(("g", "u", "s", "p", "has_rates"), [SIZES[0], SIZES[2]])
def test_tiles_of_states_are_full(g: int, u: int, s: int, p: int, has_rates: bool) -> None:
    """The last two dimensions of states, a TPU's tile, are more than one element each."""
    given = _inputs(g, u, s, p, 64, has_rates=has_rates)
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in given.items()}
    traced = jax.make_jaxpr(lambda arrays: chunked(Inputs.of(arrays))[0])(arrays)
    num_states = 2 * 64 // _ROW * g * u * s  # at one position of each block
    tiles = [
        each.outvars[0].aval.shape[-2:]
        for each in _all_equations(traced.jaxpr)
        if each.primitive.name in ("mul", "add", "exp") and each.outvars[0].aval.size == num_states
    ]
    assert tiles
    assert all(min(tile) > 1 for tile in tiles), tiles


def _all_equations(traced: Any) -> Iterator[Any]:
    """The equations of a traced function and of the functions that it calls."""
    for each in traced.eqns:
        yield each
        for value in each.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _all_equations(inner)
