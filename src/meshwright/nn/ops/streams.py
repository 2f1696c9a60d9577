"""A residual of several streams in JAX: their gates, their sum and their mixture."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshwright.models.streams import HyperConnections
from meshwright.nn.each_device import spec_of
from meshwright.nn.norms import along
from meshwright.nn.ops.products import ProductOps
from meshwright.nn.remat import OPERATION


class StreamOps(ProductOps):
    """The operations of `models/streams.py`. Call under `jax.set_mesh`."""

    def spread(self, name: str, x: Array, streams: HyperConnections) -> Array:
        split, shape = [*spec_of(x).partitions], (*x.shape[:2], streams.num_streams, x.shape[2])
        with jax.named_scope(name):
            split = PartitionSpec(*split[:2], None, *split[2:])
            return jnp.broadcast_to(x[:, :, None], shape, out_sharding=split)

    def stream_gates(
        self, name: str, m: Array, bias: Array, scale: Array, streams: HyperConnections
    ) -> Array:
        """f32[B, T, k]: gates before and after a part, and the mixing matrix.

        Or f32[B, T, n], the gates after the last layer, if there is only one scale.
        """
        o, wide = streams.num_streams, m.astype(jnp.float32)
        with jax.named_scope(name):
            shift = self._of_tokens(f"{name.removesuffix('_gates')}_bias", wide, bias)
            scales = self._of_tokens(f"{name.removesuffix('_gates')}_scale", wide[..., : len(scale)], scale)
            if len(scale) == 1:
                return checkpoint_name(jax.nn.sigmoid(wide * scales + shift) + streams.eps, OPERATION)
            parts = jnp.split(wide, (o, 2 * o), axis=-1), jnp.split(shift, (o, 2 * o), axis=-1)
            before, after, mix = (
                x * scales[..., n : n + 1] + b for n, (x, b) in enumerate(zip(*parts, strict=True))
            )
            mixing = _doubly_stochastic(jnp.reshape(mix, (*mix.shape[:2], o, o)), streams)
            gates = (
                jax.nn.sigmoid(before) + streams.eps,
                2 * jax.nn.sigmoid(after),
                jnp.reshape(mixing, mix.shape),
            )
            return checkpoint_name(jnp.concatenate(gates, axis=-1), OPERATION)

    def _of_tokens(self, name: str, x: Array, vector: Array) -> Array:
        """A vector as a row for each token of x. The sum of its cotangents over devices is called `name`."""
        with jax.named_scope(name):
            return along(x, self._split_as(x, (2,), vector.astype(jnp.float32)))

    def collapsed(self, name: str, x: Array, gates: Array) -> Array:
        with jax.named_scope(name):
            gates = gates[..., : x.shape[2]]
            y = jnp.sum(gates[..., None] * x.astype(jnp.float32), axis=2).astype(x.dtype)
            return checkpoint_name(y, OPERATION)

    def mixed(self, name: str, x: Array, y: Array, gates: Array) -> Array:
        """after[o] y[D] + sum over p of mix[p, o] x[p, D] for each stream o, in float32."""
        o = x.shape[2]
        with jax.named_scope(name):
            after, mix = gates[..., o : 2 * o], gates[..., 2 * o :]
            wide = x.astype(jnp.float32)
            mixed = after[..., None] * y.astype(jnp.float32)[:, :, None]
            for number in range(o):
                row = mix[..., number * o : (number + 1) * o]
                mixed += row[..., None] * wide[:, :, number : number + 1]
            return checkpoint_name(mixed.astype(x.dtype), OPERATION)


def _doubly_stochastic(mix: Array, streams: HyperConnections) -> Array:
    """exp(mix[B, T, p, o]) scaled until rows and columns sum to 1 (Sinkhorn and Knopp, 1967)."""

    def columns(mix: Array) -> Array:
        return mix / (jnp.sum(mix, axis=-2, keepdims=True) + streams.eps)

    def both(mix: Array, _: None) -> tuple[Array, None]:
        return columns(mix / (jnp.sum(mix, axis=-1, keepdims=True) + streams.eps)), None

    # A scan: without a loop, XLA for CPUs takes minutes to fuse 20 iterations (jax 0.10.2).
    start = columns(jax.nn.softmax(mix, axis=-1) + streams.eps)
    return lax.scan(both, start, length=streams.iterations - 1)[0]
