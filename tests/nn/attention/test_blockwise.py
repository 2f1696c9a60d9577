"""Attention by blocks is attention, in memory linear in the positions."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from meshwright.layout import Layout
from meshwright.models.at_layer import Places
from meshwright.models.layer_kinds import Window
from meshwright.nn.attention.blockwise import blockwise, zigzag
from meshwright.nn.attention.by_formula import ScoreForm, attend, visible
from meshwright.nn.start.device_mesh import device_mesh

LAYOUT = Layout.of()
B, T, N, K, H = 2, 32, 4, 2, 8


def random(seed: int, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape)


def with_gradients(attention: Callable, *operands: Array) -> list[Array]:
    out, pull_back = jax.vjp(attention, *operands)
    return [out, *pull_back(random(9, *out.shape))]


@pytest.mark.parametrize(
    ("how", "window", "with_sinks", "with_segments"),
    [
        (ScoreForm(0.7, softcap=2.0), None, False, True),
        (ScoreForm(H**-0.5, slopes=(0.5, 0.25, 0.1, 0.05)), Window(7), True, False),
        (ScoreForm(H**-0.5), Window(5, chunked=True), False, True),
    ],
)
def test_it_is_attention_with_its_gradients(
    how: ScoreForm, window: Window | None, with_sinks: bool, with_segments: bool
) -> None:
    positions = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    segments = jnp.broadcast_to((jnp.arange(T) // 11)[None], (B, T)) if with_segments else None
    positions = positions if segments is None else positions - 11 * segments
    places, first = Places(positions, segments), None if window is None else window.first(positions)
    operands = random(0, B, T, N, H), random(1, B, T, K, H), random(2, B, T, K, H)
    operands += (random(3, B, T, N),) if with_sinks else ()

    def blocks(q: Array, k: Array, v: Array, sinks: Array | None = None) -> Array:
        return blockwise(q, k, v, sinks, places, places, first, LAYOUT, how)

    def dense(q: Array, k: Array, v: Array, sinks: Array | None = None) -> Array:
        return attend(q, k, v, sinks, visible(places, places, first), LAYOUT, how)

    with jax.set_mesh(device_mesh(LAYOUT)):
        ours, theirs = (jax.jit(partial(with_gradients, f))(*operands) for f in (blocks, dense))
    for one, other in zip(ours, theirs, strict=True):
        assert jnp.max(jnp.abs(one - other)) < 5e-6 * jnp.max(jnp.abs(other))


@pytest.mark.slow
def test_its_memory_is_linear_in_the_positions() -> None:
    """At T = 8192, forward and backward, under an eighth of the dense form, by the compiler's figures."""
    long = 8192
    places = Places(jnp.arange(long)[None])
    shape = jax.ShapeDtypeStruct((1, long, 1, 64), jnp.float32)

    def blocks(q: Array, k: Array, v: Array) -> Array:
        return blockwise(q, k, v, None, places, places, None, LAYOUT, ScoreForm(64**-0.5))

    def dense(q: Array, k: Array, v: Array) -> Array:
        return attend(q, k, v, None, visible(places, places, None), LAYOUT, ScoreForm(64**-0.5))

    def temporaries(attention: Callable) -> int:
        program = jax.jit(partial(with_gradients, attention)).lower(shape, shape, shape).compile()
        memory = program.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    with jax.set_mesh(device_mesh(LAYOUT)):
        blocks_bytes, dense_bytes = temporaries(blocks), temporaries(dense)
    assert blocks_bytes < dense_bytes / 8


def test_shards_of_a_zigzag_have_equal_work() -> None:
    positions = np.asarray(zigzag(jnp.arange(16)[None], 4))[0]
    assert positions.tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    assert len({int(shard.sum()) for shard in positions.reshape(4, 4)}) == 1
