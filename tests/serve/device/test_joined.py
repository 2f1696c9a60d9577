"""Small arrays of a step are sent as one, and come apart as they were."""

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.serve.device.joined import joined, joined_type, taken_apart

RANDOM = np.random.default_rng(0)


def test_arrays_come_apart_as_they_were() -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    whole = jax.sharding.NamedSharding(mesh, PartitionSpec())
    arrays = {
        "tokens": RANDOM.integers(0, 9, 5, np.int32),
        "heat": RANDOM.normal(size=(3, 2)).astype(np.float32),
        "seeds": RANDOM.integers(0, 2**32, 4, np.uint32),
        "none": np.zeros((0, 2), np.int32),
    }
    types = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for name, x in arrays.items()}
    sent = joined(arrays)
    assert sent.shape == joined_type(types, whole).shape
    with jax.set_mesh(mesh):
        found = jax.jit(lambda x: taken_apart(x, types))(jax.device_put(sent, whole))
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
