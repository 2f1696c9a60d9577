"""The layout's mesh on real (or virtual) devices, and shardings as JAX writes them, both ways."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard
from jax.typing import DTypeLike

from meshwright.errors import DeviceError, NotationError
from meshwright.layout import Layout
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.mesh import Mesh
from meshwright.platforms import CPU, PLATFORMS, Platform


def device_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The layout's mesh with explicit axes, over the first available devices.

    Raises DeviceError if there are too few.
    """
    return explicit_mesh(layout.mesh, devices, asked_by=f"the layout {layout}")


def explicit_mesh(mesh: Mesh, devices: Sequence[Any] | None = None, asked_by: str = "") -> jax.sharding.Mesh:
    """`mesh` with explicit axes, over the first available devices.

    A mesh of all devices of a torus follows it (`device_grid`). Raises DeviceError in the name of `asked_by`
    if there are too few.
    """
    devices = list(jax.devices()) if devices is None else list(devices)
    needed = mesh.num_devices
    if len(devices) < needed:
        raise DeviceError(
            f"{asked_by or mesh} needs {needed} devices and JAX sees {len(devices)} "
            f"({devices[0].platform}); on CPU set XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        )
    shape = tuple(mesh.sizes.values())
    whole = PLATFORMS[devices[0].platform].torus_mesh and needed == len(devices)
    grid = device_grid(devices, shape) if whole else np.asarray(devices[:needed]).reshape(shape)
    return jax.sharding.Mesh(grid, mesh.axes, axis_types=(AxisType.Explicit,) * len(shape))


def device_grid(devices: Sequence[Any], sizes: Sequence[int]) -> np.ndarray:
    """All devices of TPU slices as an array, with axes along dimensions of the torus.

    With several slices, the outermost axis of more than one device crosses from slice to slice.
    """
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices=devices, allow_split_physical_axes=True)
    outer = [1] * len(sizes)
    outer[next(i for i, size in enumerate(sizes) if size > 1)] = num_slices
    inner = [size // across for size, across in zip(sizes, outer, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices=devices, allow_split_physical_axes=True)


def default_platform() -> Platform:
    """The platform of JAX's default backend."""
    return PLATFORMS[jax.default_backend()]


def platform() -> Platform:
    """The platform's record for the current mesh; CPU if the mesh has no devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return PLATFORMS[device.platform] if device else CPU


def partition_spec(array: ShardedArray, reduced: Axes = ()) -> PartitionSpec:
    """`array` as JAX writes it; over `reduced` axes the cotangent will be a partial sum.

    A[I_XY, J]{U_Z} is P(("X", "Y"), None, unreduced={"Z"}).
    """
    parts = [axes[0] if len(axes) == 1 else axes or None for axes in array.axes]
    return PartitionSpec(*parts, unreduced=frozenset(array.unreduced), reduced=frozenset(reduced))


def named_sharding(array: ShardedArray, mesh: jax.sharding.Mesh) -> NamedSharding:
    """`array` as a sharding on `mesh`."""
    return NamedSharding(mesh, partition_spec(array))


def array_type(
    array: ShardedArray,
    mesh: jax.sharding.Mesh,
    sizes: Mapping[str, int],
    dtype: DTypeLike,
    reduced: Axes = (),
) -> jax.ShapeDtypeStruct:
    """The type of `array` under explicit axes, to trace or compile for without values.

    Raises NotationError if a dimension does not divide.
    """
    array.local_shape(notation_mesh(mesh), sizes)
    shape = tuple(sizes[dim] for dim in array.dims)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, partition_spec(array, reduced)))


# The inverse. A PartitionSpec does not name the array and its dimensions, so they are arguments.


def notation_mesh(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Mesh:
    """The mesh as the notation has it: its axes with their sizes, without devices."""
    return Mesh(dict(mesh.shape))


def from_partition_spec(name: str, dims: Sequence[str], spec: PartitionSpec) -> ShardedArray:
    """The array that `spec` shards; dimensions that it leaves out are whole.

    Partial sums have no order in JAX and come sorted; for `reduced` see `reduced_axes`.
    Raises NotationError for more entries than `dims`, or one left to the compiler.

    >>> print(from_partition_spec("A", "IJ", PartitionSpec(("X", "Y"), unreduced={"Z"})))
    A[I_XY, J]{U_Z}
    """
    if len(spec) > len(dims):
        raise NotationError(
            f"{spec} has {len(spec)} entries, more than {name}[{', '.join(dims)}] has dimensions"
        )
    entries = (*spec.partitions, *[None] * (len(dims) - len(spec)))
    for dim, entry in zip(dims, entries, strict=True):
        if entry is PartitionSpec.UNCONSTRAINED:
            raise NotationError(f"{spec}: {dim} of {name} is left to the compiler, which has no notation")
    axes = tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries)
    return ShardedArray(name, tuple(dims), axes, tuple(sorted(spec.unreduced)))


def reduced_axes(spec: PartitionSpec) -> Axes:
    """Mesh axes with partial sums of the cotangent, sorted."""
    return tuple(sorted(spec.reduced))


def resharded(x: Array, spec: PartitionSpec) -> Array:
    """`x` as `spec` says, by collectives that have the name of the scope around."""
    return reshard(named_here(x), spec)


def named_here(x: Array) -> Array:
    """A copy of `x` with the same sharding, so that its collectives are named after this scope.

    XLA removes the copy. It names a collective after the reshard (JAX 0.10) or after the moved array (0.12),
    which may be from another scope. A partial sum belongs to the scope that sums it, and is not copied. XLA
    joins equal reshards of one array, and keeps reshards of several copies apart.
    """
    spec = jax.typeof(x).sharding.spec
    return x if spec.unreduced else reshard(x, spec)


def sum_named_here(x: Array) -> Array:
    """A copy of the partial sum `x`, so that its sum over devices is named after this scope.

    The copy rounds numbers to the precision that they have, and XLA removes it.
    """
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def from_named_sharding(name: str, dims: Sequence[str], sharding: NamedSharding) -> ShardedArray:
    """The array that `sharding` places; partial sums come in the order of its mesh."""
    array = from_partition_spec(name, dims, sharding.spec)
    return array.replace(unreduced=tuple(a for a in sharding.mesh.axis_names if a in array.unreduced))


def from_array_type(name: str, dims: Sequence[str], x: Any) -> ShardedArray:
    """The array whose explicit type `x` has: an array, a tracer, or a result of `array_type`.

    Raises NotationError if a mesh axis is not explicit: its type lacks the sharding then.
    """
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).sharding
    for axis, kind in zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True):
        if kind != AxisType.Explicit:
            raise NotationError(
                f"{name}[{', '.join(dims)}]: mesh axis {axis} is {kind.name}, so the type does not say "
                "which dimension it splits; fits: a mesh of AxisType.Explicit"
            )
    return from_named_sharding(name, dims, sharding)
