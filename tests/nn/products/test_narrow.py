"""Products of fp8, int8 and fp4 against the same in numpy, number by number."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from tests.nn.products.narrow import LAYOUT, PLAN, RANDOM, W, X, in_tiles, rounded

from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of
from meshwright.nn.experts.grouped_products import FORWARD, OF_ROWS, OF_WEIGHTS
from meshwright.nn.products.narrow import narrow_multiply, narrow_product
from meshwright.nn.start.device_mesh import device_mesh, partition_spec


def product_and_gradients(
    kind: str, scales: str, x: np.ndarray, w: np.ndarray, d_y: np.ndarray
) -> list[np.ndarray]:
    """y, and from its cotangent d_y those of x and w."""

    def both(x: jax.Array, w: jax.Array) -> tuple:
        y, pull_back = jax.vjp(lambda x, w: narrow_product(PLAN, jnp.float32, kind, x, w, scales), x, w)
        return y, *pull_back(jnp.asarray(d_y))

    with jax.set_mesh(device_mesh(LAYOUT)):
        return [np.asarray(one) for one in jax.jit(both)(x, w)]


@pytest.mark.parametrize(("kind", "far"), [("fp8", 0.1), ("int8", 0.02)])
def test_each_operand_is_scaled_along_what_is_summed_over(kind: str, far: float) -> None:
    d_y = np.cos(np.arange(2 * 3 * 2 * 5)).reshape(2, 3, 2, 5).astype(np.float32)
    found = product_and_gradients(kind, "rows", X, W, d_y)
    parts = [
        ("btd,dnh->btnh", (X, (2,)), (W, (0,))),
        ("btnh,dnh->btd", (d_y, (2, 3)), (W, (1, 2))),
        ("btd,btnh->dnh", (X, (0, 1)), (d_y, (0, 1))),
    ]
    for one, (spec, lhs, rhs) in zip(found, parts, strict=True):
        expected = np.einsum(spec, rounded(lhs[0], lhs[1], kind), rounded(rhs[0], rhs[1], kind))
        np.testing.assert_allclose(np.asarray(one), expected, rtol=0, atol=1e-4 * np.abs(expected).max())
        plain = np.einsum(spec, lhs[0], rhs[0])
        error = np.abs(np.asarray(one) - plain).max() / np.abs(plain).max()
        assert 1e-4 < error < far


@pytest.mark.parametrize(("kind", "far"), [("fp8", 0.1), ("int8", 0.02)])
def test_tiles_of_128_numbers_have_scales_of_their_own(kind: str, far: float) -> None:
    """Of activations and gradients each row, of weights 128 rows; a scale of one tile bounds no other."""
    random = np.random.default_rng(1)
    x, w = (random.normal(size=shape).astype(np.float32) for shape in [(2, 75, 160), (160, 3, 48)])
    d_y = random.normal(size=(2, 75, 3, 48)).astype(np.float32)
    x[..., 128:] *= 1e-4  # lost to fp8, had a row one scale
    w[128:] *= 1e4

    y, d_x, d_w = product_and_gradients(kind, "tiles", x, w, d_y)
    flat_x, flat_w, flat_d = x.reshape(150, 160), w.reshape(160, 144), d_y.reshape(150, 144)
    parts = [
        (y.reshape(150, 144), flat_x, flat_w.T, 128),
        (d_x.reshape(150, 160), flat_d, flat_w, 128),
        (d_w.reshape(160, 144), flat_x.T, flat_d.T, 1),
    ]
    for found, lhs, rhs, high in parts:
        expected = in_tiles(lhs, kind, 1) @ in_tiles(rhs, kind, high).T
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        plain = lhs @ rhs.T
        assert 1e-4 < np.abs(found - plain).max() / np.abs(plain).max() < far


def in_blocks(x: np.ndarray, high: int) -> np.ndarray:
    """What NVFP4 leaves of x[rows, sum] in blocks of `high` by 16, with a power of two over all scales."""
    largest = np.abs(x).max() / 6 / 448
    over_all = 2.0 ** (np.floor(np.log2(largest)) + 1)
    found = np.empty_like(x)
    for i in range(0, x.shape[0], high):
        for j in range(0, x.shape[1], 16):
            block = x[i : i + high, j : j + 16]
            scale = np.float32(np.clip(np.abs(block).max() / 6 / over_all, 2.0**-9, 448))
            scale = scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(over_all)
            values = np.clip(block / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
            found[i : i + high, j : j + 16] = values.astype(np.float32) * scale
    return found


def test_blocks_of_fp4_have_scales_of_fp8_under_one_of_all() -> None:
    """In 16 by 16 of a weight, of which the last are not full; a block of little is not lost."""
    random = np.random.default_rng(1)
    x, w = (random.normal(size=shape).astype(np.float32) for shape in [(2, 75, 40), (40, 3, 24)])
    d_y = random.normal(size=(2, 75, 3, 24)).astype(np.float32)
    x[..., 16:32] *= 1e-3
    w[:16] *= 1e3

    y, d_x, d_w = product_and_gradients("fp4", "rows", x, w, d_y)
    flat_x, flat_w, flat_d = x.reshape(150, 40), w.reshape(40, 72), d_y.reshape(150, 72)
    parts = [
        (y.reshape(150, 72), flat_x, flat_w.T, 16),
        (d_x.reshape(150, 40), flat_d, flat_w, 16),
        (d_w.reshape(40, 72), flat_x.T, flat_d.T, 1),
    ]
    for found, lhs, rhs, high in parts:
        expected = in_blocks(lhs, 1) @ in_blocks(rhs, high).T
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        plain = lhs @ rhs.T
        # A bit of mantissa: 11% of the root mean square of each operand.
        assert 0.05 < np.linalg.norm(found - plain) / np.linalg.norm(plain) < 0.2


def _compiled(multiply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A product in one program, which compiles in a fifth of the time of its operations one by one."""
    return jax.jit(multiply, static_argnums=(0, 3))


def test_bfloat16_holds_numbers_of_fp4_and_their_scales() -> None:
    """So products in it are those in float32, but for the order of sums."""
    random = np.random.default_rng(2)
    x, w = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in [(32, 64), (64, 48)])
    wide, narrow = (
        _compiled(narrow_multiply(dtype, "fp4"))("CI,IO->CO", x, w, True)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    np.testing.assert_allclose(narrow, wide, rtol=0, atol=1e-5 * np.abs(wide).max())


def test_devices_with_other_shares_round_to_the_same_fp4() -> None:
    """Their scales over all differ, by powers of two."""
    x = RANDOM.normal(size=(8, 1, 64)).astype(np.float32) * 2.0 ** np.arange(-4, 4)[:, None, None]
    w = RANDOM.normal(size=(64, 2, 8)).astype(np.float32)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return narrow_product(plan, jnp.float32, "fp4", x, w)

    found = []
    for layout in (LAYOUT, Layout.of(data=8, weights_dtype="f32", compute_dtype="f32")):
        plan, mesh = contraction_of(layout, "wq", "BTD,DNH->BTNH"), device_mesh(layout)
        with jax.set_mesh(mesh):
            split = jax.device_put(x, NamedSharding(mesh, partition_spec(plan.lhs)))
            found.append(np.asarray(jax.jit(product)(split, jnp.asarray(w))))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("narrow", "scales", "bound"),
    # Half a step of int8 is 1/254 of the largest of a line, about 3 deviations: 0.7% of each operand. fp8
    # has 3 bits of mantissa: at most 6%, 2.6% on average of each.
    # fp4 has 1 bit: 11% of the root mean square of each.
    [
        ("int8", "tiles", 0.02),
        ("fp8", "rows", 0.05),
        pytest.param("int8", "rows", 0.02, marks=pytest.mark.slow),
        pytest.param("fp8", "tiles", 0.05, marks=pytest.mark.slow),
        ("fp4", "tiles", 0.18),
        pytest.param("fp4", "rows", 0.18, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_experts_are_multiplied_narrow_forward_and_backward(
    narrow: str, scales: str, bound: float
) -> None:
    random, sizes = np.random.default_rng(0), {"C": 16, "I": 160, "O": 96}
    multiply = _compiled(narrow_multiply(jnp.float32, narrow, scales))
    for spec, is_weight in ((FORWARD, True), (OF_ROWS, True), (OF_WEIGHTS, False)):
        operands, _, _ = spec.partition("->")
        one, other = (
            jnp.asarray(random.normal(size=[sizes[letter] for letter in letters]), jnp.float32)
            for letters in operands.split(",")
        )
        expected = jnp.einsum(spec, one, other)
        found = multiply(spec, one, other, is_weight)
        assert 0 < jnp.linalg.norm(found - expected) < bound * jnp.linalg.norm(expected)


def test_operands_of_f16_are_cast_and_summed_in_float32() -> None:
    """Without scales: what is small loses bits, and what is beyond the type is infinite."""
    x = X * np.asarray([1e-6, 1, 1e5], np.float32)[None, :, None]
    d_y = np.cos(np.arange(2 * 3 * 2 * 5)).reshape(2, 3, 2, 5).astype(np.float32)

    def both(x: jax.Array, w: jax.Array) -> tuple:
        y, pull_back = jax.vjp(lambda x, w: narrow_product(PLAN, jnp.float32, "f16", x, w), x, w)
        return y, *pull_back(jnp.asarray(d_y))

    with jax.set_mesh(device_mesh(LAYOUT)):
        y, d_x, _ = (np.asarray(one) for one in jax.jit(both)(x, W))
    with np.errstate(over="ignore"):
        cast_x, cast_w, cast_d = (one.astype(np.float16).astype(np.float32) for one in (x, W, d_y))
    found, expected = y[:, :2], np.einsum("btd,dnh->btnh", cast_x[:, :2], cast_w)
    # By row, since the first has a millionth of the second.
    largest = np.abs(expected).max(axis=(2, 3), keepdims=True)
    assert (np.abs(found - expected) < 1e-5 * largest).all()
    assert (np.abs(found - np.einsum("btd,dnh->btnh", x[:, :2], W)) > 1e-3 * largest)[:, 0].any()
    assert not np.isfinite(y[:, 2]).all()
    np.testing.assert_allclose(d_x, np.einsum("btnh,dnh->btd", cast_d, cast_w), rtol=0, atol=1e-4)
