"""GPUs, as XLA's compiler for CUDA knows them by the figures that their driver reports."""

from typing import Any

from meshwright.audit.compile.target import Target
from meshwright.errors import DeviceError
from meshwright.hardware.chip import Chip
from meshwright.hardware.topology import Hardware


def target(machine: Hardware) -> Target:
    """The compiler for the GPUs of a machine."""
    chip = machine.chip
    domains = machine.dims if len(machine.dims) > 1 else (1, *machine.dims)
    topology = "x".join(map(str, (1, *domains)))
    title = f"XLA for {chip.name}:{topology.removeprefix('1x')} (CUDA)"
    return Target(
        "gpu", topology, gpu=chip.name, capability=chip.compute_capability, config=_config(chip), title=title
    )


def devices(target: Target) -> list[Any]:
    """The GPUs. Raises DeviceError if JAX has already looked for GPUs and given up their compiler."""
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            platform="cuda", topology_name=target.gpu, topology=target.topology, target_config=target.config
        )
    except NotImplementedError as error:
        raise DeviceError(
            "JAX has looked for GPUs in this process, found none and given their compiler up; "
            "set JAX_PLATFORMS=cpu in the environment of the process"
        ) from error
    return list(described.devices)


def _config(chip: Chip) -> str:
    """XLA's GpuTargetConfigProto."""
    figures = chip.compiler
    assert figures and chip.compute_capability, chip.name
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {int(chip.compute_capability)} }}
  core_count: {figures.cores}
  fpus_per_core: {figures.fp32_units}
  clock_rate_ghz: {figures.clock_ghz}
  memory_bandwidth: {figures.memory_bytes_per_second}
  device_memory_size: {figures.memory_bytes}
  l2_cache_size: {figures.l2_bytes}
  shared_memory_per_core: {figures.shared_bytes}
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {figures.shared_bytes - 2**10}
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
device_description_str: "{figures.name}"
"""
