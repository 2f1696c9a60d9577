"""Whose compiler an audit asks, and the devices it compiles for, of which none need be attached."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.errors import AuditError, DeviceError, nearest
from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout

if TYPE_CHECKING:
    import jax

TARGETS = ("cpu", "tpu")
# Chips that libtpu compiles for, by its names and ours. For v4 and tpu7x it lists two devices a chip,
# and a layout counts chips.
_LIBTPU_CHIPS = ("v5e", "v5p", "v6e")
# Virtual devices beyond this make XLA:CPU's compile slow; larger meshes need the target's compiler.
MAX_CPU_DEVICES = 256
_INSTALL = 'pip install "meshwright[tpu]"'


@dataclass(frozen=True)
class Target:
    """A compiler and what it compiles for.

    topology: as libtpu writes it, `v5p:4x4x4`; chips_per_host: the block of chips that a host has
    along each dimension. Both are empty for cpu, whose virtual devices are only a number.
    """

    name: str
    topology: str = ""
    chips_per_host: tuple[int, ...] = ()

    @property
    def compiler(self) -> str:
        """The compiler in words, for people."""
        return f"XLA for {self.topology} (libtpu)" if self.topology else "XLA for CPU"

    @property
    def has_reduce_scatter(self) -> bool:
        """Whether the compiler can emit one: XLA:CPU writes a sum of which each device keeps a slice."""
        return self.name != "cpu"

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the packages that decide the program."""
        packages = ("jax", "jaxlib", *(["libtpu"] if self.topology else []))
        return {name: importlib.metadata.version(name) for name in packages}

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which libtpu compiles without looking for chips or a metadata server."""
        alone = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
        return {"JAX_PLATFORMS": "cpu", **(alone if self.topology else {})}


def choose_target(hardware: str, layout: Layout, asked: str | None = None) -> Target:
    """The compiler for a plan's hardware: `asked`, or TPU's own where it is installed, else the CPU's.

    Raises AuditError where the target cannot compile the layout, DeviceError where it is not installed.
    """
    if asked is not None and asked not in TARGETS:
        raise AuditError(f"--target {asked!r} is not supported; {nearest(asked, list(TARGETS))}")
    machine = load(hardware)
    known = _refusal(machine) == ""
    if asked == "tpu" or (asked is None and known and libtpu_is_installed()):
        return _tpu(machine, layout)
    if layout.mesh.num_devices > MAX_CPU_DEVICES:
        raise AuditError(
            f"the layout {layout} has {layout.mesh.num_devices} devices and the cpu target compiles for "
            f"at most {MAX_CPU_DEVICES}; audit a smaller mesh of the same axes"
            + (f", or install the TPU's compiler: {_INSTALL}" if known and asked is None else "")
        )
    return Target("cpu")


def libtpu_is_installed() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def _refusal(machine: Hardware) -> str:
    """Why libtpu's programs for `machine` cannot be audited, or ""."""
    if machine.chip.name not in _LIBTPU_CHIPS:
        return (
            f"--target tpu compiles for {', '.join(_LIBTPU_CHIPS)}, not for {machine.spec}; use --target cpu"
        )
    if machine.num_slices > 1:
        slices = machine.num_slices
        return f"--target tpu compiles for one slice, and {machine.spec} has {slices}; audit one of them"
    return ""


def _tpu(machine: Hardware, layout: Layout) -> Target:
    if refusal := _refusal(machine):
        raise AuditError(refusal)
    if not libtpu_is_installed():
        raise DeviceError(f"--target tpu needs the TPU's compiler, which is not installed: {_INSTALL}")
    machine.place(layout.mesh)  # raises LayoutError where the mesh is not of as many devices as chips
    # libtpu wants whole hosts, of 2 x 2 chips by default, which an odd dimension does not divide into.
    hosts = tuple(2 if size % 2 == 0 else 1 for size in machine.dims[:2])
    return Target("tpu", f"{machine.chip.name}:{'x'.join(map(str, machine.dims))}", (*hosts, 1))


def target_mesh(target: Target, layout: Layout) -> "jax.sharding.Mesh | None":
    """The layout's mesh on the target's devices; None for the cpu, whose devices JAX has at hand."""
    if not target.topology:
        return None
    from jax.experimental import mesh_utils, topologies
    from jax.sharding import AxisType, Mesh

    described = topologies.get_topology_desc(
        platform="tpu", topology_name=target.topology, chips_per_host_bounds=list(target.chips_per_host)
    )
    sizes = tuple(layout.mesh.sizes.values())
    devices = mesh_utils.create_device_mesh(sizes, devices=described.devices, allow_split_physical_axes=True)
    return Mesh(devices, layout.mesh.axes, axis_types=(AxisType.Explicit,) * len(sizes))
