"""States in slots: tokens in rows of several steps give the results of the whole sequence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.layout import Layout
from meshwright.nn.attention.paged import Rows
from meshwright.nn.mixers.convolution import convolved
from meshwright.nn.mixers.recurrence import Inputs, chunked
from meshwright.nn.mixers.state_cache import StateCache
from meshwright.nn.start.device_mesh import device_mesh

ROWS, PADDING, NO_SLOT = (Rows(1, 1), Rows(3, 4)), -1, 3
# Rows of two steps, each (sequence, its first position, tokens): one of a token, and three of up to four.
STEPS = [
    [(None, 0, 0), ("a", 0, 4), ("a", 4, 4), ("b", 0, 4)],
    [("b", 4, 1), ("a", 8, 4), ("a", 12, 2), (None, 0, 0)],
]
SLOTS, LENGTHS = {"a": 2, "b": 0, None: NO_SLOT}, {"a": 14, "b": 5}


def _inputs(length: int) -> tuple[Inputs, Any]:
    """Inputs of a recurrence, and of a convolution."""
    random = np.random.default_rng(length)
    q, k, x = random.normal(size=(3, length, 2, 3)).astype(np.float32)
    v = random.normal(size=(length, 2, 2, 3)).astype(np.float32)
    decay, beta = random.uniform(size=(2, length, 2, 2)).astype(np.float32)
    return Inputs(*map(jnp.asarray, (q, k / 2, v, -decay, beta))), x


def _tokens(rows: list[tuple[str | None, int, int]]) -> list[tuple[str | None, int]]:
    """(sequence, position) of every token of a step."""
    lengths = [row.length for row in ROWS for _ in range(row.num_rows)]
    return [
        (name, at + i if i < count else PADDING)
        for (name, at, count), length in zip(rows, lengths, strict=True)
        for i in range(length)
    ]


def test_rows_of_several_steps_are_one_sequence() -> None:
    whole = {name: _inputs(length) for name, length in LENGTHS.items()}
    taps = jnp.asarray(np.random.default_rng(7).normal(size=(2, 3, 4)), jnp.float32)

    @jax.jit
    def step(states: Any, positions: Any, slots: Any, inputs: Inputs, x: Any) -> Any:
        cache = StateCache(states, positions, slots, ROWS, 1, NO_SLOT)
        out, cache = cache.recurrence(0, "state", inputs)
        y, cache = cache.convolved(0, "conv", x, taps)
        return out, y, cache.states

    with jax.set_mesh(device_mesh(Layout.of())):
        # Slots hold the states of earlier sequences, which new ones do not see.
        states = {"state": [jnp.ones((4, 2, 2, 3, 3))], "conv": [jnp.ones((4, 2, 3, 3))]}
        results: dict[Any, list[Any]] = {name: [] for name in (*LENGTHS, None)}
        for rows in STEPS:
            tokens = _tokens(rows)
            of_tokens = [
                jax.tree.map(lambda leaf, at=at: leaf[at], whole[name or "a"]) for name, at in tokens
            ]
            given = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *of_tokens)
            positions = jnp.asarray([at for _, at in tokens])
            out, y, states = step(states, positions, jnp.asarray([SLOTS[name] for name, _ in tokens]), *given)
            for number, (name, at) in enumerate(tokens):
                if at != PADDING:
                    results[name].append((np.asarray(out)[number], np.asarray(y)[number]))
        for name, (inputs, x) in whole.items():
            out, y = (np.stack(of_all) for of_all in zip(*results[name], strict=True))
            expected, _ = jax.jit(chunked)(jax.tree.map(lambda leaf: leaf[None], inputs))
            np.testing.assert_allclose(out, expected[0], atol=1e-5)
            np.testing.assert_allclose(y, convolved(jnp.asarray(x)[None], taps, None)[0], atol=1e-5)
