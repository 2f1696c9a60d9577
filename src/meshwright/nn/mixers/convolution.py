"""Convolutions along positions, channel by channel: y_t = sum over j of taps_j x_(t - c + 1 + j)."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.nn.each_device import partitions_of, spec_of, with_gradient
from meshwright.nn.mixers.pieces import Pieces, halos


def convolved(x: Array, taps: Array, segments: Array | None) -> Array:
    """y like x[B, T, ...], by taps[..., c] split as x; inputs of another segment count as zeros.

    The cotangent of taps stays partial over the axes of their `reduced` type.
    """
    spec = jax.typeof(taps).sharding.spec
    parts, kept = spec.partitions, spec.reduced
    width, of_x = taps.shape[-1], partitions_of(x)

    def along(taps: Array, j: int) -> Array:
        tap = lax.index_in_dim(taps, j, axis=-1, keepdims=False)
        split = PartitionSpec(*of_x)
        return jnp.broadcast_to(tap[None, None], x.shape, out_sharding=split).astype(x.dtype)

    def shifted(x: Array, count: int, segments: Array | None) -> Array:
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

    # Segments are an argument: within a recomputed layer a derivative may not refer to the layer's arrays.
    @jax.custom_vjp
    def run(x: Array, taps: Array, segments: Array | None) -> Array:
        here = reshard(taps, PartitionSpec(*parts))
        terms = [along(here, j) * shifted(x, width - 1 - j, segments) for j in range(width)]
        return sum(terms)  # type: ignore[return-value]

    def backward(saved: tuple[Array, Array, Array | None], d: Array) -> tuple[Array, Array, None]:
        x, taps, segments = saved
        here = reshard(taps, PartitionSpec(*parts))
        d_x = sum(shifted(d * along(here, j), -(width - 1 - j), segments) for j in range(width))
        products = jnp.stack([d * shifted(x, width - 1 - j, segments) for j in range(width)], axis=-1)
        out = PartitionSpec(*parts, unreduced=kept)
        d_taps = lax.reduce_sum(products.astype(taps.dtype), (0, 1), out_sharding=out)
        return d_x, d_taps, None  # type: ignore[return-value]

    run.defvjp(lambda *given: (run(*given), given), backward)
    return run(x, taps, segments)


def convolved_pieces(x: Array, taps: Array, segments: Array | None, pieces: Pieces) -> Array:
    """`convolved` of positions split over devices. segments: i32[B, T], whole on every device."""
    width = taps.shape[-1]
    before = halos(x, width - 1, pieces)

    def local(x: Array, taps: Array, before: Array, *whole: Array) -> Array:
        inputs = jnp.concatenate([before, pieces.cut_local(x)], axis=2)
        counted = jnp.ones((1, 1, 1), bool)
        y = jnp.zeros((), x.dtype)
        for j in range(width):
            read = inputs[:, :, j : j + pieces.length]
            if whole:
                segments, earlier = pieces.segments_local(whole[0], width - 1)
                counted = (
                    jnp.concatenate([earlier, segments], axis=2)[:, :, j : j + pieces.length] == segments
                )
            y = y + jnp.where(_like(counted, read), read, 0) * taps[None, None, None, ..., j].astype(x.dtype)
        return y.reshape(x.shape)

    specs = [spec_of(x), spec_of(taps), spec_of(before)]
    given = [x, taps, before]
    if segments is not None:
        given.append(segments)
        specs.append(PartitionSpec(specs[0].partitions[0], None))
    out_spec = PartitionSpec(*specs[0].partitions)
    return with_gradient(jax.checkpoint(local), specs, out_spec, 3)(*given)


def _like(of_positions: Array, x: Array) -> Array:
    """of_positions[B, m, L] with the number of dimensions of x[B, m, L, ...]."""
    return of_positions.reshape(*of_positions.shape, *[1] * (x.ndim - 3))


def _shift(ndim: int, count: int) -> list[tuple[int, int, int]]:
    """The padding that moves dimension 1 by `count`."""
    return [(count, -count, 0) if dim == 1 else (0, 0, 0) for dim in range(ndim)]
