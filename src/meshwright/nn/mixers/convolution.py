"""Convolutions along positions, channel by channel: y_t = sum over j of taps_j x_(t - c + 1 + j)."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard


def convolved(x: Array, taps: Array, segments: Array | None) -> Array:
    """y like x[B, T, ...], by taps[..., c] split as x; inputs of another segment count as zeros.

    The cotangent of taps stays partial over the axes of their `reduced` type.
    """
    spec = jax.typeof(taps).sharding.spec
    parts, kept = spec.partitions, spec.reduced
    width, of_x = taps.shape[-1], jax.typeof(x).sharding.spec.partitions

    def along(taps: Array, j: int) -> Array:
        tap = lax.index_in_dim(taps, j, axis=-1, keepdims=False)
        split = PartitionSpec(*of_x)
        return jnp.broadcast_to(tap[None, None], x.shape, out_sharding=split).astype(x.dtype)

    def shifted(x: Array, count: int) -> Array:
        """x of `count` positions before, or after if that is negative; zeros of other segments."""
        if not count:
            return x
        moved = lax.pad(x, jnp.zeros((), x.dtype), _shift(x.ndim, count))
        if segments is None:
            return moved
        before = lax.pad(segments, jnp.int32(-1), _shift(2, count))
        same = (before == segments).astype(x.dtype)
        shape = (*same.shape, *[1] * (x.ndim - 2))
        mask = jnp.broadcast_to(jnp.reshape(same, shape), x.shape, out_sharding=PartitionSpec(*of_x))
        return moved * mask

    @jax.custom_vjp
    def run(x: Array, taps: Array) -> Array:
        here = reshard(taps, PartitionSpec(*parts))
        return sum(along(here, j) * shifted(x, width - 1 - j) for j in range(width))  # type: ignore[return-value]

    def backward(saved: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
        x, taps = saved
        here = reshard(taps, PartitionSpec(*parts))
        d_x = sum(shifted(d * along(here, j), -(width - 1 - j)) for j in range(width))
        products = jnp.stack([d * shifted(x, width - 1 - j) for j in range(width)], axis=-1)
        out = PartitionSpec(*parts, unreduced=kept)
        d_taps = lax.reduce_sum(products.astype(taps.dtype), (0, 1), out_sharding=out)
        return d_x, d_taps  # type: ignore[return-value]

    run.defvjp(lambda x, taps: (run(x, taps), (x, taps)), backward)
    return run(x, taps)


def _shift(ndim: int, count: int) -> list[tuple[int, int, int]]:
    """The padding that moves dimension 1 by `count`."""
    return [(count, -count, 0) if dim == 1 else (0, 0, 0) for dim in range(ndim)]
