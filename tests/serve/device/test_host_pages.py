"""Copies in the host's memory: each comes back under its number, for its replica."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.errors import PlanError
from meshwright.serve.device.host_pages import HostCopies, HostSizes

# Of two replicas a page in two arrays: keys of three numbers, and a scale.
PAGE = {"k": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), "scale": jax.ShapeDtypeStruct((2,), jnp.float32)}


def exported(*values: float) -> dict[str, jax.Array]:
    """Two pages of each replica."""
    column = jnp.asarray(values, jnp.float32)
    return {"k": jnp.stack([column] * 3, axis=1).astype(jnp.bfloat16), "scale": column}


PAGE_BYTES = 2 * 3 * 2 + 2 * 4
STATE = {"state": jax.ShapeDtypeStruct((2, 5), jnp.float32)}
STATE_BYTES = 2 * 5 * 4


def test_pages_come_back_by_their_numbers():
    host = HostCopies(PAGE, 2, 4)
    host.take([[3, 0], [1]], exported(1, 2, 3, 4))  # the second page of replica 1 is nobody's
    host.take([[3], []], exported(5, 6, 7, 8))  # another one in the first one's place
    found = host.copies([[0, 3], [1]], 3)
    assert found["k"].dtype == jnp.bfloat16 and found["k"].shape == (6, 3)
    np.testing.assert_array_equal(found["scale"], [2, 5, 0, 3, 0, 0])
    np.testing.assert_array_equal(found["k"][:, 0].astype(np.float32), found["scale"])


def test_bytes_are_divided_as_the_cache_is():
    assert HostSizes.of(0, PAGE, STATE, 2, 64, 3) == (0, 0)
    assert HostSizes.of(4 * PAGE_BYTES + 1, PAGE, {}, 2, 64) == (4, 0)
    unit = STATE_BYTES + 3 * PAGE_BYTES
    assert HostSizes.of(5 * unit + 2 * PAGE_BYTES, PAGE, STATE, 2, 64, 3) == (17, 5)
    assert HostSizes.of(unit - PAGE_BYTES, PAGE, STATE, 2, 64, 3) == (2, 1)
    assert HostSizes.of(4 * STATE_BYTES, {}, STATE, 2, 64, 3) == (12, 4)  # no attention: empty pages
    message = "holds no page of 64 positions and no snapshot of states on each of 2 replicas; fits: 60 bytes"
    with pytest.raises(PlanError, match=message):
        HostSizes.of(STATE_BYTES, PAGE, STATE, 2, 64, 3)
