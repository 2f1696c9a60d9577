"""The layout's mesh on real (or virtual) devices, and shardings as JAX writes them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwright.errors import DeviceError
from meshwright.layout import Layout
from meshwright.notation.array import Axes, ShardedArray


def device_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The layout's mesh with explicit axes, over the first devices that there are.

    Raises DeviceError if there are too few.
    """
    devices = list(jax.devices()) if devices is None else list(devices)
    needed = layout.mesh.num_devices
    if len(devices) < needed:
        raise DeviceError(
            f"the layout {layout} needs {needed} devices and JAX sees {len(devices)} "
            f"({devices[0].platform}); on CPU set XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        )
    shape = tuple(layout.mesh.sizes.values())
    grid = np.asarray(devices[:needed]).reshape(shape)
    return jax.sharding.Mesh(grid, layout.mesh.axes, axis_types=(AxisType.Explicit,) * len(shape))


def partition_spec(array: ShardedArray, reduced: Axes = ()) -> PartitionSpec:
    """`array` as JAX writes it; over `reduced` axes the cotangent will be a partial sum.

    A[I_XY, J]{U_Z} is P(("X", "Y"), None, unreduced={"Z"}).
    """
    parts = [axes[0] if len(axes) == 1 else axes or None for axes in array.axes]
    return PartitionSpec(*parts, unreduced=frozenset(array.unreduced), reduced=frozenset(reduced))


def named_sharding(array: ShardedArray, mesh: jax.sharding.Mesh) -> NamedSharding:
    """`array` as a sharding on `mesh`."""
    return NamedSharding(mesh, partition_spec(array))
