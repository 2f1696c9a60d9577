"""Cotangents of vectors that are repeated over an array's other dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.nn.norms import along
from meshwright.nn.start.device_mesh import device_mesh


def test_a_partial_sum_counts_copies_of_rows_once() -> None:
    """Devices along kv_replicas, which splits queries and not keys, hold the same rows of keys."""
    x = np.arange(24, dtype=np.float32).reshape(4, 6)

    def gradient(x: jax.Array, scale: jax.Array) -> jax.Array:
        partial = reshard(scale, PartitionSpec(None, reduced=frozenset({"fsdp", "kv_replicas"})))
        d = jax.grad(lambda scale: jnp.sum(x * along(x, scale)))(partial)
        assert jax.typeof(d).sharding.spec.unreduced == {"fsdp", "kv_replicas"}
        return reshard(d, PartitionSpec(None))

    layout = Layout.parse("fsdp=2,kv_replicas=2")
    with jax.set_mesh(device_mesh(layout)):
        placed = jax.device_put(x, PartitionSpec("fsdp", None))
        np.testing.assert_array_equal(jax.jit(gradient)(placed, jnp.ones(6)), x.sum(0))
