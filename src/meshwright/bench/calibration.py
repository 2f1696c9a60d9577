"""Calibration: hardware for plans from measurements of this machine's devices.

All devices work at once, as in a training step, so that a device's figures are for its share of the cores.
All programs are timed in the same rounds, so that other work on the machine slows all figures equally. Only a
server's programs are timed afterwards, in more rounds (bench/serving_steps.py). On CPUs the figures are the
achieved rates. On accelerators the rated peaks stay, and the figures are the achieved shares ([step]).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import jax

from meshwright.bench import collective_times, matmul, memory_bandwidth, serving_steps, train_step
from meshwright.bench.all_devices import Operand, bench_of, local_hardware
from meshwright.bench.measured_hardware import with_collectives
from meshwright.bench.sizes import CALIBRATION, group_mesh
from meshwright.bench.timing import Prepared, run_prepared, run_together, tell
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.models.config import ModelConfig
from meshwright.programs.efficiency import StepEfficiency

_NUM_LAUNCHES = 50


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure: V of collectives and streamed arrays, in bytes; matmuls; models of steps."""

    collectives: tuple[int, ...] = CALIBRATION
    matmuls: tuple[matmul.MatmulShape, ...] = matmul.SHAPES
    arrays: tuple[int, ...] = memory_bandwidth.CPU_ARRAYS
    model: ModelConfig = field(default_factory=train_step.sample_model)
    served: ModelConfig = field(default_factory=serving_steps.served_model)


ACCELERATOR_SIZES = Sizes(
    collectives=(*CALIBRATION, 134_217_728),
    matmuls=matmul.ACCELERATOR_SHAPES,
    arrays=memory_bandwidth.ACCELERATOR_ARRAYS,
)


@dataclass(frozen=True)
class Calibration:
    """The hardware and its measurements."""

    hardware: Hardware
    matmuls: list[matmul.MeasuredMatmul]
    streams: list[memory_bandwidth.MeasuredMemory]
    collectives: list[collective_times.MeasuredCollective]
    steps: list[train_step.MeasuredStep]


def calibrate(spec: str, *, progress: Callable[[str], None] | None = None) -> Hardware:
    """The hardware `spec` with its figures as measured on this machine.

    JAX must have been started on the machine's devices: N virtual ones for cpu:N. progress: called with a
    message for each step. Raises DeviceError if JAX has other devices or too few.
    """
    if catalog.load(spec).chip.platform.virtual:
        return measure(spec, Sizes(), progress).hardware
    return measure_accelerators(spec, ACCELERATOR_SIZES, progress)


def measure_accelerators(spec: str, sizes: Sizes, progress: Callable[[str], None] | None = None) -> Hardware:
    """The GPUs or TPUs `spec` with measured shares of their products, memory and links.

    step.matmul: share of a dtype's peak over all shapes. step.memory: share of the peak in a multiply-add.
    """
    hardware = local_hardware(spec)
    num_devices = hardware.num_chips
    prepared = [
        matmul.prepare(num_devices, progress, sizes.matmuls),
        memory_bandwidth.prepare(num_devices, progress, sizes.arrays),
        *_exchanges(num_devices, progress, sizes),
    ]
    tell(progress, f"timing {sum(len(one.programs) for one in prepared)} programs")
    matmuls, streams, *exchanged = run_together(prepared)
    chip = hardware.chip
    chip = replace(
        chip,
        matmul_rates=matmul.matmul_rates(matmuls),
        memory_rates=memory_bandwidth.memory_rates(streams),
        step=StepEfficiency(
            matmul={
                dtype: min(1.0, rate / chip.flops(dtype))
                for dtype, rate in matmul.rates_by_dtype(matmuls).items()
            },
            memory=min(1.0, memory_bandwidth.streaming_bytes_per_second(streams) / chip.hbm_bytes_per_second),
            sources=_shares_sources(num_devices),
        ),
        sources={
            **chip.sources,
            "efficiency": f"{_where(num_devices, 'devices')}: bandwidth by size, over several group sizes",
        },
    )
    hardware = replace(hardware, chip=chip).running(hardware.software.name)
    return with_collectives(hardware, exchanged[0]) if exchanged else hardware


def measure(spec: str, sizes: Sizes, progress: Callable[[str], None] | None = None) -> Calibration:
    """The calibration of `cpu:N`: FLOPs by dtype, memory, launch and a line for each collective."""
    host = local_hardware(spec)
    num_devices = host.num_chips
    prepared = [
        matmul.prepare(num_devices, progress, sizes.matmuls),
        memory_bandwidth.prepare(num_devices, progress, sizes.arrays),
        _launches(num_devices),
        train_step.prepare(num_devices, progress, sizes.model),
        *_exchanges(num_devices, progress, sizes),
    ]
    tell(progress, f"timing {sum(len(one.programs) for one in prepared)} programs")
    matmuls, streams, (launch,), steps, *exchanged = run_together(prepared)
    streaming = memory_bandwidth.streaming_bytes_per_second(streams)
    chip = replace(
        host.chip,
        flops_per_second=matmul.rates_by_dtype(matmuls),
        hbm_bytes_per_second=streaming,
        host_link_bytes_per_second=streaming,
        matmul_rates=matmul.matmul_rates(matmuls),
        memory_rates=memory_bandwidth.memory_rates(streams),
        step=StepEfficiency(overlap=0.0, launch_seconds=launch, sources=_host_step_sources(num_devices)),
        sources=_host_sources(num_devices),
    )
    hardware = replace(host, chip=chip).running(host.software.name)
    measured = [one for each in exchanged for one in each]
    if measured:
        hardware = with_collectives(hardware, measured)
    hardware = train_step.with_effective_memory(steps, hardware)
    if num_devices == 1:  # servers on CPUs use one device
        served = serving_steps.prepare(progress, sizes.served)
        tell(progress, f"timing {len(served.programs)} kinds of steps of a server")
        [of_server] = run_prepared(served, serving_steps.ROUNDS)
        hardware = serving_steps.with_inference(of_server, hardware)
    return Calibration(hardware, matmuls, streams, measured, steps)


def _exchanges(num_devices: int, progress: Callable[[str], None] | None, sizes: Sizes) -> list[Prepared]:
    """The collectives; none for a single device, which keeps the links of the catalog."""
    if num_devices == 1:
        return []
    return [collective_times.prepare(group_mesh(num_devices), progress, sizes.collectives)]


def _launches(num_devices: int) -> Prepared[float]:
    """Seconds of a program that adds 1 to a number on every device."""
    empty = bench_of(num_devices).program(lambda x: x + 1, [Operand((1,), "f32")])

    def launches() -> None:
        for _ in range(_NUM_LAUNCHES):
            empty()

    return Prepared([launches], lambda timings: [timings[0].per(_NUM_LAUNCHES).seconds])


def _where(num_devices: int, devices: str) -> str:
    processes = f" in {jax.process_count()} processes over gloo" if jax.process_count() > 1 else ""
    return f"measured by mw calibrate with {num_devices} {devices} at work{processes}, JAX {version('jax')}"


def _shares_sources(num_devices: int) -> dict[str, str]:
    where = _where(num_devices, "devices")
    return {
        "matmul": f"{where}: forward and gradient products of a layer's shapes",
        "memory": f"{where}: a multiply-add over arrays beyond the caches",
    }


def _host_step_sources(num_devices: int) -> dict[str, str]:
    where = _where(num_devices, "virtual devices")
    return {
        "memory_by_dtype": f"{where}: the step that gave the memory bandwidth, in the other dtypes",
        "overlap": "0: device threads and collectives take turns on the same cores",
        "launch_seconds": f"{where}: an almost empty program",
    }


def _host_sources(num_devices: int) -> dict[str, str]:
    where = _where(num_devices, "virtual devices")
    return {
        "flops_per_second": f"{where}: forward and gradient products of {len(matmul.SHAPES)} shapes",
        "hbm_bytes_per_second": f"{where}: what memory-bound operations get in a two-layer training step",
        "host_link_bytes_per_second": f"{where}: a multiply-add over arrays of 1 and 17 MB",
        "network": f"{where}: latency, and bandwidth by size, over groups of several sizes",
    }
