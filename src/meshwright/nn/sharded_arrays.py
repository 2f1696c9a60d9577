"""Whole arrays cut into blocks on devices as the notation says, and compared on them."""

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from meshwright.nn.start.device_mesh import named_sharding, partition_spec
from meshwright.notation.array import Axes, ShardedArray

Position = tuple[int, ...]


def put(
    whole: np.ndarray, array: ShardedArray, mesh: jax.sharding.Mesh, reduced: Axes = (), seed: int = 0
) -> Array:
    """`whole` on the devices of `mesh`, sharded as `array`.

    Where `array` is a partial sum its devices hold random small integers that add up to it, so that
    a device which takes its addend for the sum is found out. reduced: see `partition_spec`.
    """
    random = np.random.default_rng(seed)
    blocks: dict[Position, np.ndarray] = {}
    for group, index in _summed_groups(array, mesh, whole.shape):
        block = whole[index].astype(np.float32)
        addends = [random.integers(-1, 2, block.shape).astype(np.float32) for _ in group[1:]]
        blocks |= dict(zip(group, [block - sum(addends), *addends], strict=True))
    placed = [jax.device_put(blocks[p].astype(whole.dtype), mesh.devices[p]) for p in _positions(mesh)]
    sharding = NamedSharding(mesh, partition_spec(array, reduced))
    return jax.make_array_from_single_device_arrays(whole.shape, sharding, placed)


def max_abs_error(placed: Array, array: ShardedArray, whole: np.ndarray) -> float:
    """The largest difference on any device between `placed`, its addends summed, and `whole`."""
    mesh = placed.sharding.mesh if isinstance(placed.sharding, NamedSharding) else None
    assert isinstance(mesh, jax.sharding.Mesh), f"{array} is on no mesh of devices"
    blocks = {shard.device: np.asarray(shard.data, np.float64) for shard in placed.addressable_shards}
    errors = [
        np.abs(sum(blocks[mesh.devices[p]] for p in group) - whole[index]).max(initial=0.0)
        for group, index in _summed_groups(array, mesh, whole.shape)
    ]
    return float(max(errors))


def _summed_groups(
    array: ShardedArray, mesh: jax.sharding.Mesh, shape: tuple[int, ...]
) -> list[tuple[list[Position], tuple[slice, ...]]]:
    """Mesh positions whose blocks add up to one block of the whole array, and the slices of that block."""
    where = named_sharding(array.replace(unreduced=()), mesh).devices_indices_map(shape)
    groups: dict[Position, list[Position]] = {}
    for position in _positions(mesh):
        apart = tuple(
            p for p, axis in zip(position, mesh.axis_names, strict=True) if axis not in array.unreduced
        )
        groups.setdefault(apart, []).append(position)
    return [(group, where[mesh.devices[group[0]]]) for group in groups.values()]


def _positions(mesh: jax.sharding.Mesh) -> list[Position]:
    return list(np.ndindex(mesh.devices.shape))
