"""The GPUs that XLA's CUDA compiler can be told of without one: what its target description asks for."""

from dataclasses import dataclass


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
