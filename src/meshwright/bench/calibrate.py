"""Measures this machine's devices, and describes them as hardware that plans can be priced on.

All devices work at once, as in a training step, so a figure is one device's share of the cores.
All programs are timed in the same rounds, so figures stay in proportion where the machine is shared.
On a host what is measured is what is achieved: matmul_efficiency is 1 and nothing is derived from a
peak. On accelerators the peaks of the sheet stay, and what is measured is the share of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version

from meshwright.bench import collectives, matmul, memory, step
from meshwright.bench.devices import Operand, bench_of, local_hardware
from meshwright.bench.model import with_collectives
from meshwright.bench.sizes import CALIBRATION, group_mesh
from meshwright.bench.timing import Prepared, report, run_together
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.models.config import ModelConfig

_NUM_LAUNCHES = 50


@dataclass(frozen=True)
class Sizes:
    """What is measured: collectives by V and arrays streamed, in bytes; matmuls; a model's step."""

    collectives: tuple[int, ...] = CALIBRATION
    matmuls: tuple[matmul.Shape, ...] = matmul.SHAPES
    arrays: tuple[int, ...] = memory.SIZES
    model: ModelConfig = field(default_factory=step.sample_model)


ACCELERATOR_SIZES = Sizes(
    collectives=(*CALIBRATION, 134_217_728),
    matmuls=matmul.ACCELERATOR_SHAPES,
    arrays=memory.ACCELERATOR_SIZES,
)


@dataclass(frozen=True)
class Calibration:
    """The hardware and the measurements behind it."""

    hardware: Hardware
    matmuls: list[matmul.Measured]
    streams: list[memory.Measured]
    collectives: list[collectives.Measured]
    steps: list[step.Measured]


def calibrate(spec: str, *, progress: Callable[[str], None] | None = None) -> Hardware:
    """The hardware `spec` with its figures as measured on this machine.

    JAX must have been started on these devices: N virtual ones for cpu:N. progress: told what is
    being measured. Raises DeviceError where JAX has other devices or too few.
    """
    if catalog.load(spec).chip.kind == "cpu":
        return measure(spec, Sizes(), progress).hardware
    return measure_accelerators(spec, ACCELERATOR_SIZES, progress)


def measure_accelerators(spec: str, sizes: Sizes, progress: Callable[[str], None] | None = None) -> Hardware:
    """The GPUs or TPUs `spec` with matmul_efficiency, memory and links as measured.

    matmul_efficiency: share of the bf16 peak over all shapes. Memory is what a multiply-add streams.
    """
    hardware = local_hardware(spec)
    num_devices = hardware.num_chips
    prepared = [
        matmul.prepare(num_devices, progress, sizes.matmuls),
        memory.prepare(num_devices, progress, sizes.arrays),
        collectives.prepare(group_mesh(num_devices), progress, sizes.collectives),
    ]
    report(progress, f"timing {sum(len(one.programs) for one in prepared)} programs")
    matmuls, streams, exchanged = run_together(prepared)
    chip = replace(
        hardware.chip,
        matmul_efficiency=min(1.0, matmul.rates_by_dtype(matmuls)["bf16"] / hardware.chip.flops("bf16")),
        hbm_bytes_per_second=memory.streaming_bytes_per_second(streams),
        matmul_rates=matmul.rates_by_size(matmuls),
        memory_rates=memory.rates_by_size(streams),
        sources=dict(hardware.chip.sources) | _measured_sources(num_devices),
    )
    return with_collectives(replace(hardware, chip=chip), exchanged)


def measure(spec: str, sizes: Sizes, progress: Callable[[str], None] | None = None) -> Calibration:
    """The calibration of `cpu:N`: FLOPs by dtype, memory, launch and a line for each collective."""
    host = local_hardware(spec)
    num_devices = host.num_chips
    prepared = [
        matmul.prepare(num_devices, progress, sizes.matmuls),
        memory.prepare(num_devices, progress, sizes.arrays),
        _launches(num_devices),
        collectives.prepare(group_mesh(num_devices), progress, sizes.collectives),
        step.prepare(num_devices, progress, sizes.model),
    ]
    report(progress, f"timing {sum(len(one.programs) for one in prepared)} programs")
    matmuls, streams, (launch,), exchanged, steps = run_together(prepared)
    streaming = memory.streaming_bytes_per_second(streams)
    chip = replace(
        host.chip,
        flops_per_second=matmul.rates_by_dtype(matmuls),
        hbm_bytes_per_second=streaming,
        host_link_bytes_per_second=streaming,
        matmul_efficiency=1.0,
        overlap=0.0,
        launch_seconds=launch,
        matmul_rates=matmul.rates_by_size(matmuls),
        memory_rates=memory.rates_by_size(streams),
        sources=_sources(num_devices),
    )
    hardware = step.with_effective_memory(steps, with_collectives(replace(host, chip=chip), exchanged))
    return Calibration(hardware, matmuls, streams, exchanged, steps)


def _launches(num_devices: int) -> Prepared[float]:
    """The seconds of a program that adds one to one number on every device."""
    empty = bench_of(num_devices).program(lambda x: x + 1, [Operand((1,), "f32")])

    def launches() -> None:
        for _ in range(_NUM_LAUNCHES):
            empty()

    return Prepared([launches], lambda timings: [timings[0].per(_NUM_LAUNCHES).seconds])


def _measured_sources(num_devices: int) -> dict[str, str]:
    where = f"measured by mw calibrate with {num_devices} devices at work, JAX {version('jax')}"
    return {
        "hbm_bytes_per_second": f"{where}: a multiply-add over arrays beyond the caches",
        "matmul_efficiency": f"{where}: forward and gradient products of a layer's shapes in bf16",
        "efficiency": f"{where}: bandwidth by size, over groups of several sizes",
    }


def _sources(num_devices: int) -> dict[str, str]:
    where = f"measured by mw calibrate with {num_devices} virtual devices at work, JAX {version('jax')}"
    return {
        "flops_per_second": f"{where}: forward and gradient products of {len(matmul.SHAPES)} shapes",
        "hbm_bytes_per_second": f"{where}: what memory-bound operations get in a two-layer training step",
        "memory_efficiency": f"{where}: the same step in the other dtypes",
        "host_link_bytes_per_second": f"{where}: a multiply-add over arrays of 1 and 17 MB",
        "matmul_efficiency": "1: flops_per_second is what was achieved, not a peak",
        "overlap": "0: device threads and collectives take turns on the same cores",
        "launch_seconds": f"{where}: an almost empty program",
        "network": f"{where}: latency, and bandwidth by size, over groups of several sizes",
    }
