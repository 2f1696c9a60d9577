"""A chip's ratings and the links that leave it. Figures are in chips/*.toml."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from meshwright.dtypes import dtype_bytes, number_type
from meshwright.errors import HardwareError
from meshwright.platforms import PLATFORMS, Platform
from meshwright.points import Points, share_at
from meshwright.programs.efficiency import StepEfficiency

# By kind of link (ici, dcn, nvlink, network), then by collective.
LinkEfficiency = Mapping[str, Mapping[str, Points]]
# The exponent of clock_share.
_CLOCK_OF_POWER = 0.4
# HBM that the runtime and the compiler keep, if a chip's file does not say it.
RESERVED_SHARE = 0.05
# The host's memory that its own programs need.
HOST_RESERVED_SHARE = 0.1
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


@dataclass(frozen=True)
class Torus:
    """TPU chips on a 2D or 3D grid of inter-chip links (ICI); slices meet over the data-centre network.

    pod: the largest grid. one_way_bytes_per_second: of one link, in one direction.
    wraparound_multiple_of: rings close where every dimension is a multiple of this (full cubes).
    wraparound_exactly: a ring closes only along a dimension of exactly this size.
    dcn_bytes_per_second: one way, a chip's share of its host's network card.
    efficiency: measured share of the links' bandwidth by bytes of V; 1 if nothing is listed.
    scatter_passes: of a reduce-scatter over several dimensions at once, as `StepEfficiency` has it.
    within, between: names of the usual networks of a slice and between slices (hardware/networks/).
    """

    pod: tuple[int, ...]
    one_way_bytes_per_second: float
    hop_seconds: float
    dcn_bytes_per_second: float
    dcn_hop_seconds: float
    wraparound_multiple_of: int | None = None
    wraparound_exactly: int | None = None
    efficiency: LinkEfficiency = field(default_factory=dict, hash=False)
    scatter_passes: int = 1
    within: str | None = field(default=None, compare=False)
    between: str | None = field(default=None, compare=False)

    def wraparound(self, dims: tuple[int, ...]) -> tuple[bool, ...]:
        """Whether the links of each dimension of a slice close to a ring.

        Optical switches join the faces of whole cubes, so one short dimension leaves the others open.
        Source: How to Scale Your Model, "TPU networking".
        """
        if self.wraparound_multiple_of is not None:
            full_cubes = all(size % self.wraparound_multiple_of == 0 for size in dims)
            return tuple(full_cubes for _ in dims)
        return tuple(size == self.wraparound_exactly for size in dims)


# NCCL's all-to-all reaches NVLink's bandwidth only over this number of GPUs or fewer, as in one host.
EXCHANGE_PEERS = 8


@dataclass(frozen=True)
class Switch:
    """GPUs on a switched NVLink domain; domains meet over one network card (NIC) a GPU.

    nvlink_bytes_per_second, nic_bytes_per_second: one way, a GPU.
    nvlink_hop_seconds, nic_hop_seconds: latency of one step of a large message (NCCL's protocol Simple).
    collective_launch_seconds: fixed time of one collective, before its first hop.
    efficiency: measured share of the links' bandwidth by bytes of V; 1 if nothing is listed.
    by_nodes: by collective, the measured share of the cards' bandwidth by number of domains. falloff: an
    unmeasured collective reaches (domains / 2)^-falloff; 0 for a network of full bisection.
    between: name of the usual network between domains (hardware/networks/).
    exchange_bytes_per_second: a GPU's rate in NCCL's all-to-all inside a domain, which the training program
    decides (`TrainingProgram`); 0: the rate of other collectives.
    direct_seconds: of an all-reduce of few bytes inside a domain whose GPUs read each other's memory, as
    serving engines write it; 0: no such kernel.
    """

    domain_size: int
    nvlink_bytes_per_second: float
    nvlink_hop_seconds: float
    nic_bytes_per_second: float
    nic_hop_seconds: float
    collective_launch_seconds: float
    efficiency: LinkEfficiency = field(default_factory=dict, hash=False)
    by_nodes: Mapping[str, Points] = field(default_factory=dict, hash=False)
    falloff: float = 0.0
    between: str | None = field(default=None, compare=False)
    exchange_bytes_per_second: float = 0.0
    direct_seconds: float = 0.0

    def share_by_nodes(self, op: str, num_domains: int) -> float:
        """The share of the cards' bandwidth that a collective over `num_domains` reaches."""
        if op in self.by_nodes:
            return share_at(self.by_nodes[op], num_domains)
        return 1.0 if op == "permute" else (num_domains / 2) ** -self.falloff


@dataclass(frozen=True)
class LinearCost:
    """Seconds of one collective as measured: latency + bytes / (bytes_per_second * share(bytes)).

    efficiency: the share by bytes (see points.py); without points the cost is a straight line.
    bytes: written by one device: V, the gathered array (see cost/collectives.py), for all_gather,
    reduce_scatter and all_reduce, and V / n over n devices for all_to_all and permute.
    """

    latency_seconds: float
    bytes_per_second: float
    efficiency: Points = ()

    def seconds(self, num_bytes: float) -> float:
        """Seconds of a collective of `num_bytes`."""
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
class CompilerTarget:
    """A chip as its compiler knows it, for compiling without one.

    name: libtpu's, or a GPU driver's. Of GPUs, as their driver reports them: cores: streaming
    multiprocessors. fp32_units, shared_bytes: of one core; a block may use 1 KiB of shared memory less.
    """

    name: str
    cores: int = 0
    fp32_units: int = 0
    shared_bytes: int = 0
    clock_ghz: float = 0.0
    l2_bytes: int = 0
    memory_bytes: int = 0
    memory_bytes_per_second: int = 0


@dataclass(frozen=True)
class Chip:
    """One accelerator (or one virtual device of a host), as its vendor rates it.

    kind: tpu, gpu or cpu. flops_per_second: by dtype, dense peak.
    hbm_bytes: memory of the chip. hbm_usable_bytes: the part that its runtime leaves to a program, if known;
    it may be more, since vendors write GB for GiB. spared_bytes: the part of it that plans leave free.
    host_bytes: memory of its host, which chips_per_host chips share.
    host_link_bytes_per_second: between chip and host, one way (PCIe or C2C).
    machines: chips of a machine that a cloud rents or a vendor sells, by its name in lower case.
    matrix_unit: rows and columns of its systolic arrays; a smaller product leaves part of them empty.
    num_matrix_units: systolic arrays of the chip. compiler: None: no compiler is known that needs no chip.
    gke_accelerator: label of nodes in Google Kubernetes Engine.
    cores_in_cloud_names: cores of a chip that the number in a cloud's name counts (v5p-256 has 128 chips).
    compute_capability: of NVIDIA's GPUs, which decides their kernels; None: no GPU of NVIDIA's.
    power_watts: the power it is rated for (TDP). power_limit_watts: this machine's limit, if it is lower.
    price_per_chip_hour: list price on demand, in `currency`; None: unknown. no_price: why no
    list price is known.
    matmul_rates, memory_rates: as measured, by dtype: FLOPs a second by the FLOPs of a product, bytes a
    second by the bytes that an operation touches; empty if nothing was measured.
    step: the shares of the ratings that a training step reaches. inference: the same for prefill and
    generate; None: those of `step`. sources: the source of each figure, by key.
    """

    name: str
    kind: str
    flops_per_second: Mapping[str, float] = field(hash=False)
    hbm_bytes: int
    hbm_bytes_per_second: float
    host_bytes: int
    host_link_bytes_per_second: float
    chips_per_host: int
    network: Torus | Switch | SharedMemory
    aliases: tuple[str, ...] = ()
    machines: Mapping[str, int] = field(default_factory=dict, hash=False)
    matrix_unit: int | None = None
    num_matrix_units: int | None = None
    compiler: CompilerTarget | None = None
    gke_accelerator: str | None = None
    cores_in_cloud_names: int | None = None
    compute_capability: float | None = None
    hbm_usable_bytes: int | None = None
    spared_bytes: int = 0
    power_watts: float | None = None
    power_limit_watts: float | None = None
    price_per_chip_hour: float | None = None
    no_price: str | None = None
    currency: str = "USD"
    matmul_rates: Mapping[str, Points] = field(default_factory=dict, hash=False)
    memory_rates: Mapping[str, Points] = field(default_factory=dict, hash=False)
    step: StepEfficiency = StepEfficiency()
    inference: StepEfficiency | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def clock_hertz(self) -> float | None:
        """Cycles per second of a TPU, from its peak; None if its arrays are not known."""
        if self.num_matrix_units is None or self.matrix_unit is None:
            return None
        return self.flops("bf16") / (2 * self.matrix_unit**2 * self.num_matrix_units)

    @property
    def platform(self) -> Platform:
        """The record of its kind."""
        return PLATFORMS[self.kind]

    def flops(self, dtype: str) -> float:
        """Peak FLOPs (or integer operations) a second in `dtype`.

        A type without units of its own computes in the narrowest wider type: fp8 on an A100 as bf16.
        Integers may widen to floats, floats never to integers.
        """
        if dtype in self.flops_per_second:
            return self.flops_per_second[dtype]
        record = number_type(dtype)
        if record.priced_as and self.has_units(dtype):
            return self.flops_per_second[record.priced_as]
        wider = [known for known in self.flops_per_second if record.widens_to(number_type(known))]
        if not wider:
            listed = ", ".join(self.flops_per_second)
            raise HardwareError(f"{self.name} lists no FLOPs for {dtype} or wider; it has {listed}")
        alike = [known for known in wider if number_type(known).is_integer == record.is_integer]
        return self.flops_per_second[min(alike or wider, key=dtype_bytes)]

    def has_units(self, dtype: str) -> bool:
        """Whether the chip has matrix units for `dtype`."""
        return number_type(dtype).has_units(self.flops_per_second, self.compute_capability)

    @property
    def program_bytes(self) -> int:
        """HBM for a plan: `hbm_usable_bytes`, or all but RESERVED_SHARE, less `spared_bytes`."""
        return (self.hbm_usable_bytes or round(self.hbm_bytes * (1 - RESERVED_SHARE))) - self.spared_bytes

    def leaving(self, num_bytes: float) -> "Chip":
        """The chip, but plans leave a further `num_bytes` of its HBM free."""
        return replace(self, spared_bytes=self.spared_bytes + round(num_bytes))

    @property
    def reported_bytes(self) -> int:
        """HBM that a GPU's driver reports; the rated HBM if that is unknown.

        Serving engines set a share of it aside for weights and cache.
        """
        if not (self.platform.driver_reports and self.hbm_usable_bytes):
            return self.hbm_bytes
        return round(self.hbm_usable_bytes / (1 - RESERVED_SHARE))

    @property
    def host_program_bytes(self) -> float:
        """A chip's share of its host's memory, less the part that the host needs."""
        return self.host_bytes / self.chips_per_host * (1 - HOST_RESERVED_SHARE)

    def lacking_bytes(self, needed: float, host: float) -> float:
        """Bytes missing for a program that needs `needed` on the chip and `host` of its share of the host."""
        return max(0, needed - self.program_bytes) + max(0, host - self.host_program_bytes)

    @property
    def clock_share(self) -> float:
        """The share of its clock that a chip keeps under a power limit below its rated power.

        Dense products draw all available power. Power grows with the clock times the voltage squared, and
        the voltage falls with the clock: the clock follows a root of the power, between square and cube.
        """
        if self.power_watts is None or self.power_limit_watts is None:
            return 1.0
        return min(1.0, self.power_limit_watts / self.power_watts) ** _CLOCK_OF_POWER

    def matmul_flops_per_second(self, dtype: str, outputs: float = inf) -> float:
        """FLOPs a second of a product in `dtype` with `outputs` elements in its result."""
        filled = 1 / (1 + self.step.matmul_half_outputs / outputs)
        return self.flops(dtype) * self.step.matmul_share(dtype) * filled * self.clock_share

    def attention_flops_per_second(self, dtype: str, head: float, keys: float = inf) -> float:
        """FLOPs a second that flash attention reaches at head dimension `head`, with `keys` a query.

        The scores contract over the head dimension, which is also the values' number of columns, so a head
        smaller than the matrix unit leaves part of it empty.
        """
        filled = min(1.0, head / self.matrix_unit) if self.matrix_unit else 1.0
        long = 1 / (1 + self.step.attention_half_keys / keys)
        return self.flops(dtype) * self.step.attention * filled * long * self.clock_share

    def memory_bytes_per_second(self, dtype: str) -> float:
        """HBM bytes a second that memory-bound work in `dtype` gets."""
        return self.hbm_bytes_per_second * self.step.memory_share(dtype)

    @property
    def overlap(self) -> float:
        """The share of a transfer's time that simultaneous compute hides (`StepEfficiency.overlap`)."""
        return self.step.overlap

    def ideal(self) -> "Chip":
        """This chip with steps that reach every rating."""
        return replace(self, step=StepEfficiency(), inference=None)

    def roofline(self) -> "Chip":
        """This chip at its rated peaks, for rooflines (`StepEfficiency.is_roofline`).

        Its links have no latency.
        """
        hops = ("hop_seconds", "dcn_hop_seconds", "nvlink_hop_seconds", "nic_hop_seconds")
        network = self.network
        if not isinstance(network, SharedMemory):
            no_time = {key: 0.0 for key in (*hops, "collective_launch_seconds") if hasattr(network, key)}
            curves = {"efficiency": {}} | ({"by_nodes": {}} if isinstance(network, Switch) else {})
            network = replace(network, **no_time, **curves)
        return replace(self, step=StepEfficiency(is_roofline=True), inference=None, network=network)

    @property
    def link_bytes_per_second(self) -> float:
        """One-way bytes a second of the fastest link that leaves the chip (ICI, NVLink or memory)."""
        if isinstance(self.network, Torus):
            return self.network.one_way_bytes_per_second
        if isinstance(self.network, Switch):
            return self.network.nvlink_bytes_per_second
        return self.network.costs["all_gather"].bytes_per_second
