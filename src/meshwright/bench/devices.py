"""The virtual devices that are measured, and programs that keep all of them busy at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.bench.timing import Program
from meshwright.errors import DeviceError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.nn.params import JAX_DTYPES

AXES = ("groups", "group")


@dataclass(frozen=True)
class Operand:
    """An array argument of one device: its shape and dtype (a name of units.DTYPE_BYTES)."""

    shape: tuple[int, ...]
    dtype: str


def virtual_host(spec: str) -> Hardware:
    """The `cpu:N` that `spec` names, after checking that JAX has as many CPU devices.

    Raises DeviceError for other hardware, and where JAX has another platform or too few devices.
    """
    hardware = catalog.load(spec)
    if hardware.chip.kind != "cpu":
        raise DeviceError(f"calibrate {spec}: only virtual CPU devices can be measured; write cpu:8")
    if hardware.num_chips < 2:
        raise DeviceError(f"calibrate {spec}: one device has no collectives; write cpu:8")
    found = jax.devices()
    if found[0].platform != "cpu" or len(found) < hardware.num_chips:
        raise DeviceError(
            f"calibrate {spec}: JAX sees {len(found)} {found[0].platform} devices, not {hardware.num_chips} "
            f"CPU devices; set JAX_PLATFORMS=cpu "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={hardware.num_chips}"
        )
    return hardware


def program(
    local: Callable[..., object], operands: Sequence[Operand], num_devices: int, group_size: int
) -> Program:
    """`local` compiled to run on every device at once, each on operands of its own.

    Inside, the axis `group` spans `group_size` devices. Operands are zeros: the time does not depend
    on the values, and a sum repeated many times stays finite.
    """
    grid = np.asarray(jax.devices()[:num_devices]).reshape(-1, group_size)
    mesh = jax.sharding.Mesh(grid, AXES)
    split = PartitionSpec(AXES)
    arrays = [_zeros(operand, NamedSharding(mesh, split), num_devices) for operand in operands]
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    compiled = run.lower(*arrays).compile()
    return lambda: jax.block_until_ready(compiled(*arrays))


def _zeros(operand: Operand, sharding: NamedSharding, num_devices: int) -> Array:
    shape = (num_devices * operand.shape[0], *operand.shape[1:])
    dtype = np.dtype(JAX_DTYPES[operand.dtype])
    return jax.make_array_from_callback(
        shape, sharding, lambda index: np.zeros(operand.shape, dtype), dtype=dtype
    )
