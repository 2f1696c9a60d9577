"""The measured devices, and programs that run on all of them at once."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.bench.timing import TimedCall
from meshwright.errors import DeviceError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.nn.array_types import jax_dtype
from meshwright.notation.mesh import Mesh


@dataclass(frozen=True)
class Operand:
    """An array argument of one device: its shape and dtype (a name in dtypes.NUMBER_TYPES)."""

    shape: tuple[int, ...]
    dtype: str


def local_hardware(spec: str) -> Hardware:
    """The hardware of a spec, after checking that JAX has its devices.

    Raises DeviceError if JAX has another platform or too few devices.
    """
    hardware = catalog.load(spec)
    kind, needed = hardware.chip.kind, hardware.num_chips
    devices = jax.devices()
    if devices[0].platform != kind or len(devices) < needed:
        cure = f"; set JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        raise DeviceError(
            f"{spec}: JAX sees {len(devices)} {devices[0].platform} devices, not {needed} {kind} devices"
            f"{cure if hardware.chip.platform.virtual else ''}"
        )
    return hardware


def free_bytes(hardware: Hardware) -> int:
    """Free bytes of a device, or its share of the host's free memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // hardware.num_chips


@dataclass(frozen=True)
class Bench:
    """Devices in a mesh, and the shared operands of their programs."""

    mesh: Mesh
    _operands: dict[Operand, Array] = field(default_factory=dict)

    def program(self, local: Callable[..., object], operands: Sequence[Operand]) -> TimedCall:
        """`local` compiled to run on all devices at once, each with its own blocks.

        `local` can use the names of the mesh axes. Operands are zeros, since the time does not depend on the
        values, and repeated sums stay finite.
        """
        grid = np.asarray(jax.devices()[: self.mesh.num_devices]).reshape(tuple(self.mesh.sizes.values()))
        mesh = jax.sharding.Mesh(grid, self.mesh.axes)
        split = PartitionSpec(self.mesh.axes)
        arrays = [self._zeros(operand, NamedSharding(mesh, split)) for operand in operands]
        run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
        compiled = run.lower(*arrays).compile()
        return lambda: jax.block_until_ready(compiled(*arrays))

    def _zeros(self, operand: Operand, sharding: NamedSharding) -> Array:
        if operand not in self._operands:
            shape = (self.mesh.num_devices * operand.shape[0], *operand.shape[1:])
            dtype = jax_dtype(operand.dtype)
            self._operands[operand] = jax.make_array_from_callback(
                shape, sharding, lambda index: np.zeros(operand.shape, dtype), dtype=dtype
            )
        return self._operands[operand]


def bench_of(num_devices: int) -> Bench:
    """All devices along one axis, for work without communication."""
    return Bench(Mesh({"devices": num_devices}))
