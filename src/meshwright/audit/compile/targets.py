"""Whose compiler an audit asks, and the devices it compiles for, of which none need be attached.

XLA's CUDA compiler is told of a GPU by the figures that its driver would report.
"""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.errors import AuditError, DeviceError, nearest
from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class GpuDescription:
    """Figures of one GPU as its driver reports them.

    capability: compute capability, major. cores: streaming multiprocessors. fp32: FP32 units of one.
    shared_bytes: shared memory of one core; one block may take 1 KiB less. Clock in GHz, memory in
    bytes and bytes/s.
    """

    name: str
    capability: int
    cores: int
    fp32: int
    shared_bytes: int
    clock_ghz: float
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_second: int

    @property
    def text(self) -> str:
        """XLA's GpuTargetConfigProto."""
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {self.capability} }}
  core_count: {self.cores}
  fpus_per_core: {self.fp32}
  clock_rate_ghz: {self.clock_ghz}
  memory_bandwidth: {self.memory_bytes_per_second}
  device_memory_size: {self.memory_bytes}
  l2_cache_size: {self.l2_bytes}
  shared_memory_per_core: {self.shared_bytes}
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {self.shared_bytes - 2**10}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.name}"
"""


# As XLA's own target descriptions have them (openxla/xla, xla/backends/gpu/target_config/specs); of the
# A100 with 40 GB NVIDIA's data sheet has the memory.
GPUS = {
    "a100-40gb": GpuDescription(
        "NVIDIA A100-SXM4-40GB", 8, 108, 64, 167936, 1.41, 41943040, 42505273344, 1555200000000
    ),
    "a100-80gb": GpuDescription(
        "NVIDIA A100-SXM4-80GB", 8, 108, 64, 167936, 1.41, 41943040, 85100068864, 2039040000000
    ),
    "h100": GpuDescription(
        "NVIDIA H100 80GB HBM3", 9, 132, 128, 233472, 1.98, 52428800, 84942979072, 3352320000000
    ),
    "h200": GpuDescription(
        "NVIDIA H200 141GB HBM3e", 9, 132, 128, 233472, 1.98, 52428800, 151397597184, 4800000000000
    ),
    "b200": GpuDescription(
        "NVIDIA B200", 10, 148, 128, 233472, 1.965, 132644864, 191514411008, 7672320000000
    ),
}


TARGETS = ("cpu", "tpu", "gpu")
# Our names of the chips that libtpu compiles for, and its own.
_LIBTPU_CHIPS = {"v4p": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "tpu7x"}
# Virtual devices beyond this make XLA:CPU's compile slow; larger meshes need the target's compiler.
MAX_CPU_DEVICES = 256
_COMPILERS = {"tpu": ("the TPU's compiler", "tpu"), "gpu": ("the GPU's compiler", "cuda12")}
# The packages that bring a compiler, one of which is enough.
_PACKAGES = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-plugin", "jax-cuda13-plugin")}


@dataclass(frozen=True)
class Target:
    """A compiler and what it compiles for.

    topology: as the compiler writes it, `v5p:4x4x4`, or for GPUs partitions x nodes x GPUs, `1x8x8`.
    chips_per_host: the block of chips that a TPU host has along each dimension. slices: over the data
    center network. gpu: the chip, by our name. All are empty for cpu, whose virtual devices are only a
    number.
    """

    name: str
    topology: str = ""
    chips_per_host: tuple[int, ...] = ()
    slices: int = 1
    gpu: str = ""

    @property
    def compiler(self) -> str:
        """The compiler in words, for people."""
        if self.name == "gpu":
            return f"XLA for {self.gpu}:{self.topology.removeprefix('1x')} (CUDA)"
        slices = f"{self.slices}*" if self.slices > 1 else ""
        return f"XLA for {slices}{self.topology} (libtpu)" if self.topology else "XLA for CPU"

    @property
    def platform(self) -> str:
        """JAX's name of what is lowered for."""
        return "cuda" if self.name == "gpu" else self.name

    @property
    def is_alone(self) -> bool:
        """Whether one process of the machine at a time can use the compiler: libtpu locks a file."""
        return self.name == "tpu"

    @property
    def has_reduce_scatter(self) -> bool:
        """Whether the compiler can emit one: XLA:CPU writes a sum of which each device keeps a slice."""
        return self.name != "cpu"

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the packages that decide the program."""
        packages = "jax", "jaxlib", *_installed(self.name)
        return {name: importlib.metadata.version(name) for name in packages}

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which compilers look for no chips and no metadata server, and warn on stderr."""
        alone = {
            "tpu": {
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_MIN_LOG_LEVEL": "1",
                "TPU_STDERR_LOG_LEVEL": "1",
            },
            # Else JAX gives up a plugin whose driver it does not find.
            "gpu": {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
        }
        return {"JAX_PLATFORMS": "cpu", **alone.get(self.name, {})}

    def kernels(self) -> AbstractContextManager[None]:
        """Within it JAX takes the kernels that the target's chip has, and not this machine's."""
        if self.name != "gpu":
            return nullcontext()
        from meshwright.nn.attention.flash import kernels_of

        return kernels_of(GPUS[self.gpu].capability)

    @property
    def xla_flags(self) -> str:
        """The options of a compile without a GPU: no kernel can be timed, so none is chosen by its time."""
        return "--xla_gpu_autotune_level=0" if self.name == "gpu" else ""


def choose_target(hardware: str, layout: Layout, asked: str | None = None) -> Target:
    """The compiler for a plan's hardware: `asked`, or the chip's own where it is installed, else the CPU's.

    Raises AuditError where the target cannot compile the layout, DeviceError where it is not installed.
    """
    if asked is not None and asked not in TARGETS:
        raise AuditError(f"--target {asked!r} is not supported; {nearest(asked, list(TARGETS))}")
    machine = load(hardware)
    own = machine.chip.kind
    if asked in _COMPILERS or (asked is None and own in _COMPILERS and _is_ready(own, machine, layout)):
        name = asked or own
        if refusal := _refusal(name, machine, layout):
            raise AuditError(refusal)
        _check_installed(name)
        machine.place(layout.mesh)  # raises LayoutError where the mesh is not of as many devices as chips
        return _gpu(machine) if name == "gpu" else _tpu(machine)
    if layout.mesh.num_devices > MAX_CPU_DEVICES:
        helps = asked is None and own in _COMPILERS and not _refusal(own, machine, layout)
        raise AuditError(
            f"the layout {layout} has {layout.mesh.num_devices} devices and the cpu target compiles for "
            f"at most {MAX_CPU_DEVICES}; audit a smaller mesh of the same axes"
            + (f", or install {_COMPILERS[own][0]}: {_install(own)}" if helps else "")
        )
    return Target("cpu")


def own_target(machine: Hardware) -> Target:
    """The compiler of a machine's own chips.

    Raises AuditError where none is known, DeviceError where it is not installed.
    """
    name = machine.chip.kind
    known = GPUS if name == "gpu" else _LIBTPU_CHIPS
    if machine.chip.name not in known:
        raise AuditError(
            f"no compiler is known for {machine.spec}; ahead of time compile TPUs "
            f"({', '.join(_LIBTPU_CHIPS)}) and GPUs ({', '.join(GPUS)})"
        )
    _check_installed(name)
    return _gpu(machine) if name == "gpu" else _tpu(machine)


def _check_installed(name: str) -> None:
    if not is_installed(name):
        raise DeviceError(
            f"--target {name} needs {_COMPILERS[name][0]}, which is not installed: {_install(name)}"
        )


def is_installed(name: str) -> bool:
    """Whether the compiler of "tpu" or "gpu" is there."""
    return bool(_installed(name))


def _installed(name: str) -> list[str]:
    """The packages with the target's compiler that are there; none of the CPU's, which jaxlib has."""
    packages = _PACKAGES.get(name, ())
    return [one for one in packages if importlib.util.find_spec(one.replace("-", "_")) is not None]


def _is_ready(name: str, machine: Hardware, layout: Layout) -> bool:
    return is_installed(name) and not _refusal(name, machine, layout)


def _install(name: str) -> str:
    return f'pip install "meshwright[{_COMPILERS[name][1]}]"'


def _refusal(name: str, machine: Hardware, layout: Layout) -> str:
    """Why the programs of compiler `name` for `machine` cannot be audited, or ""."""
    known = GPUS if name == "gpu" else _LIBTPU_CHIPS
    if machine.chip.name not in known:
        return f"--target {name} compiles for {', '.join(known)}, not for {machine.spec}; use --target cpu"
    if machine.num_slices > 1 and layout.mesh.num_devices == machine.num_chips:
        return _crossing_refusal(machine, layout)
    return ""


def _crossing_refusal(machine: Hardware, layout: Layout) -> str:
    """A program of slices numbers its own devices: ours too only if the outermost axis alone crosses."""
    crossing = [
        axis
        for axis, links in machine.place(layout.mesh).links.items()
        if any(link.is_outer for link in links)
    ]
    first = next((axis for axis, size in layout.mesh.sizes.items() if size > 1), "")
    if crossing == [first]:
        return ""
    return (
        f"{layout} on {machine.spec}: {', '.join(crossing)} cross between slices; the audit reads programs "
        f"in which {first} alone does: its size must be a multiple of {machine.num_slices}"
    )


def _gpu(machine: Hardware) -> Target:
    domains = machine.dims if len(machine.dims) > 1 else (1, *machine.dims)
    return Target("gpu", "x".join(map(str, (1, *domains))), gpu=machine.chip.name)


def _tpu(machine: Hardware) -> Target:
    # libtpu wants whole hosts, of 2 x 2 chips by default, which an odd dimension does not divide into.
    hosts = tuple(2 if size % 2 == 0 else 1 for size in machine.dims[:2])
    topology = f"{_LIBTPU_CHIPS[machine.chip.name]}:{'x'.join(map(str, machine.dims))}"
    return Target("tpu", topology, (*hosts, 1), machine.num_slices)


def target_mesh(target: Target, layout: Layout) -> "jax.sharding.Mesh | None":
    """The layout's mesh on the target's devices; None for the cpu, whose devices JAX has at hand."""
    if not target.topology:
        return None
    from meshwright.nn.start.device_mesh import device_mesh

    return device_mesh(layout, target_devices(target))


def target_devices(target: Target) -> list[Any]:
    """The chips that a compiler describes, of which none need be attached.

    Raises DeviceError where JAX gave the GPU's compiler up, before anything here was asked.
    """
    from jax.experimental import topologies

    if target.name == "gpu":
        try:
            described = topologies.get_topology_desc(
                platform="cuda", topology_name=target.gpu, topology=target.topology,
                target_config=GPUS[target.gpu].text,
            )  # fmt: skip
        except NotImplementedError as error:
            raise DeviceError(
                "JAX has looked for GPUs in this process, found none and given their compiler up; "
                "set JAX_PLATFORMS=cpu in the environment of the process"
            ) from error
        return list(described.devices)
    slices = {"num_slices": target.slices} if target.slices > 1 else {}
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=target.topology,
        chips_per_host_bounds=list(target.chips_per_host), **slices,
    )  # fmt: skip
    # Of chips whose two cores are devices of their own, one: a layout counts chips.
    return [device for device in described.devices if device.core_on_chip == 0]
