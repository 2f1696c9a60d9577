"""Pages in the host's memory: what comes back is what was kept under its number, of each replica."""

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.serve.device.host_pages import HostPages

# Of two replicas a page in two arrays: keys of three numbers, and a scale.
PAGE = {"k": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), "scale": jax.ShapeDtypeStruct((2,), jnp.float32)}


def exported(*values: float) -> dict[str, jax.Array]:
    """Two pages of each replica."""
    column = jnp.asarray(values, jnp.float32)
    return {"k": jnp.stack([column] * 3, axis=1).astype(jnp.bfloat16), "scale": column}


def test_pages_come_back_by_their_numbers():
    host = HostPages(PAGE, 2, 4 * (2 * 3 * 2 + 2 * 4), 64)
    assert host.num_pages == 4
    host.take([[3, 0], [1]], exported(1, 2, 3, 4))  # the second page of replica 1 is nobody's
    host.take([[3], []], exported(5, 6, 7, 8))  # another one in the first one's place
    found = host.pages([[0, 3], [1]], 3)
    assert found["k"].dtype == jnp.bfloat16 and found["k"].shape == (6, 3)
    np.testing.assert_array_equal(found["scale"], [2, 5, 0, 3, 0, 0])
    np.testing.assert_array_equal(found["k"][:, 0].astype(np.float32), found["scale"])


def test_without_bytes_there_are_no_pages():
    assert HostPages(PAGE, 2, 0, 64).num_pages == 0
