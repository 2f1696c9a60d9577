"""What one chip offers, and the links that leave it. Figures come from catalog/*.toml."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.errors import HardwareError
from meshwright.hardware.efficiency import Points, share_at
from meshwright.units import dtype_bytes

# By kind of link (ici, dcn, nvlink, network), then by collective.
LinkEfficiency = Mapping[str, Mapping[str, Points]]
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


@dataclass(frozen=True)
class Torus:
    """TPU chips on a 2D or 3D grid of inter-chip links (ICI); slices meet over the data-centre network.

    pod: the largest grid. one_way_bytes_per_second: of one link, in one direction.
    wraparound_multiple_of: rings close where every dimension is a multiple of this (full cubes).
    wraparound_exactly: a ring closes only along a dimension of exactly this size.
    dcn_bytes_per_second: one way, a chip's share of its host's network card.
    efficiency: measured share of the links' bandwidth by bytes of V; 1 where nothing is listed.
    """

    pod: tuple[int, ...]
    one_way_bytes_per_second: float
    hop_seconds: float
    dcn_bytes_per_second: float
    dcn_hop_seconds: float
    wraparound_multiple_of: int | None = None
    wraparound_exactly: int | None = None
    efficiency: LinkEfficiency = field(default_factory=dict, hash=False)

    def wraparound(self, dims: tuple[int, ...]) -> tuple[bool, ...]:
        """For each dimension of a slice, whether its links close to a ring.

        Optical switches join the faces of whole cubes, so one short dimension leaves the others open.
        Source: How to Scale Your Model, "TPU networking".
        """
        if self.wraparound_multiple_of is not None:
            full_cubes = all(size % self.wraparound_multiple_of == 0 for size in dims)
            return tuple(full_cubes for _ in dims)
        return tuple(size == self.wraparound_exactly for size in dims)


@dataclass(frozen=True)
class Switch:
    """GPUs on a switched NVLink domain; domains meet over one network card (NIC) a GPU.

    nvlink_bytes_per_second, nic_bytes_per_second: one way, a GPU.
    collective_launch_seconds: fixed time of one collective, before its first hop.
    efficiency: measured share of the links' bandwidth by bytes of V; 1 where nothing is listed.
    """

    domain_size: int
    nvlink_bytes_per_second: float
    nvlink_hop_seconds: float
    nic_bytes_per_second: float
    nic_hop_seconds: float
    collective_launch_seconds: float
    efficiency: LinkEfficiency = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class LinearCost:
    """Seconds of one collective as measured: latency + bytes / (bytes_per_second * share(bytes)).

    efficiency: the share by bytes (see efficiency.py); none makes it a straight line.
    bytes: what one device must write. This is V, the gathered array (see cost/collectives.py), for
    all_gather, reduce_scatter and all_reduce, and V / n over n devices for all_to_all and permute.
    """

    latency_seconds: float
    bytes_per_second: float
    efficiency: Points = ()

    def seconds(self, num_bytes: float) -> float:
        """Seconds of `num_bytes`."""
        rate = self.bytes_per_second * share_at(self.efficiency, num_bytes)
        return self.latency_seconds + num_bytes / rate


@dataclass(frozen=True)
class SharedMemory:
    """Virtual devices on one host: a measured cost for each collective.

    Groups along a mesh axis run at once and share the memory, so a group of two devices is no
    faster than one of all: every device still writes V bytes.
    """

    costs: Mapping[str, LinearCost] = field(hash=False)


@dataclass(frozen=True)
class Chip:
    """One accelerator (or one virtual device of a host).

    kind: tpu, gpu or cpu. flops_per_second: by dtype, dense peak.
    hbm_bytes: memory of the chip. host_bytes: memory of its host, which chips_per_host chips share.
    host_link_bytes_per_second: between chip and host, one way (PCIe or C2C).
    matmul_efficiency: share of the peak that a large matmul reaches.
    memory_efficiency: by dtype, the share of hbm_bytes_per_second that elementwise work in it reaches;
    1 where nothing is listed. (XLA:CPU widens bf16 to float32 and back, so half the bytes save no time.)
    overlap: share of the collective time that may hide under compute.
    launch_seconds: fixed time of one step.
    matmul_rates, memory_rates: as measured, by dtype: FLOPs a second by the FLOPs of a product, bytes a
    second by the bytes that an operation touches; nothing is listed where nothing was measured.
    sources: where each figure comes from, by key.
    """

    name: str
    kind: str
    flops_per_second: Mapping[str, float] = field(hash=False)
    hbm_bytes: int
    hbm_bytes_per_second: float
    host_bytes: int
    host_link_bytes_per_second: float
    chips_per_host: int
    matmul_efficiency: float
    overlap: float
    launch_seconds: float
    network: Torus | Switch | SharedMemory
    aliases: tuple[str, ...] = ()
    price_per_chip_hour: float | None = None
    memory_efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    matmul_rates: Mapping[str, Points] = field(default_factory=dict, hash=False)
    memory_rates: Mapping[str, Points] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def flops(self, dtype: str) -> float:
        """Peak FLOPs (or integer operations) a second in `dtype`.

        A type without units of its own computes in the narrowest wider type: fp8 on an A100 as bf16.
        """
        if dtype in self.flops_per_second:
            return self.flops_per_second[dtype]
        wider = [known for known in self.flops_per_second if dtype_bytes(known) > dtype_bytes(dtype)]
        if not wider:
            listed = ", ".join(self.flops_per_second)
            raise HardwareError(f"{self.name} lists no FLOPs for {dtype} or wider; it has {listed}")
        return self.flops_per_second[min(wider, key=dtype_bytes)]

    def memory_bytes_per_second(self, dtype: str) -> float:
        """HBM bytes a second that memory-bound work in `dtype` gets."""
        return self.hbm_bytes_per_second * self.memory_efficiency.get(dtype, 1.0)

    def matmul_seconds(self, flops: float, dtype: str) -> float:
        """Seconds of one product: at the rate measured for its size, else at the share of the peak."""
        if dtype in self.matmul_rates:
            return flops / share_at(self.matmul_rates[dtype], flops)
        return flops / (self.flops(dtype) * self.matmul_efficiency)

    @property
    def link_bytes_per_second(self) -> float:
        """One-way bytes a second of the fastest link that leaves the chip (ICI, NVLink or memory)."""
        if isinstance(self.network, Torus):
            return self.network.one_way_bytes_per_second
        if isinstance(self.network, Switch):
            return self.network.nvlink_bytes_per_second
        return self.network.costs["all_gather"].bytes_per_second
