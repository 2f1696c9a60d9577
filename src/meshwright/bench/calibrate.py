"""Measures virtual CPU devices, and describes them as hardware that plans can be priced on.

All devices work at once, as in a training step, so a figure is one device's share of the cores.
What is measured is what is achieved: matmul_efficiency is 1 and nothing is derived from a peak.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version

from meshwright.bench import collectives, matmul, memory
from meshwright.bench.devices import Operand, program, virtual_host
from meshwright.bench.timing import report, time_interleaved
from meshwright.hardware.chip import SharedMemory
from meshwright.hardware.topology import Hardware

LAUNCH_ROUNDS = 50


@dataclass(frozen=True)
class Sizes:
    """What is measured: sizes V of collectives in bytes, matmul shapes, and elementwise arrays.

    arrays: None takes those that suit each operation.
    """

    collectives: tuple[int, ...] = collectives.SIZES
    matmuls: tuple[matmul.Shape, ...] = matmul.SHAPES
    arrays: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Calibration:
    """The hardware and the measurements behind it."""

    hardware: Hardware
    matmuls: list[matmul.Measured]
    operations: list[memory.Measured]
    collectives: list[collectives.Measured]


def calibrate(spec: str, *, progress: Callable[[str], None] | None = None) -> Hardware:
    """The hardware `cpu:N` with every figure as measured on this machine.

    JAX must have been started with N virtual CPU devices. progress: told what is being measured.
    Raises DeviceError for other hardware or too few devices.
    """
    return measure(spec, Sizes(), progress).hardware


def measure(spec: str, sizes: Sizes, progress: Callable[[str], None] | None = None) -> Calibration:
    """The calibration of `cpu:N`: FLOPs by dtype, memory, launch and a line for each collective."""
    host = virtual_host(spec)
    matmuls = matmul.measure(host.num_chips, progress, sizes.matmuls)
    operations = memory.measure(host.num_chips, progress, sizes.arrays)
    launch = launch_seconds(host.num_chips, progress)
    exchanged = collectives.measure(host.num_chips, progress, sizes.collectives)
    chip = replace(
        host.chip,
        flops_per_second=matmul.rates_by_dtype(matmuls),
        hbm_bytes_per_second=memory.bytes_per_second(operations),
        host_link_bytes_per_second=memory.bytes_per_second(operations),
        matmul_efficiency=1.0,
        overlap=0.0,
        launch_seconds=launch,
        network=SharedMemory(collectives.fit_lines(exchanged)),
        sources=_sources(host.num_chips),
    )
    return Calibration(replace(host, chip=chip), matmuls, operations, exchanged)


def launch_seconds(num_devices: int, progress: Callable[[str], None] | None = None) -> float:
    """Median seconds of a program that adds one to one number on every device."""
    report(progress, "timing an empty program")
    empty = program(lambda x: x + 1, [Operand((1,), "f32")], num_devices, 1)
    return time_interleaved([empty], LAUNCH_ROUNDS)[0].seconds


def _sources(num_devices: int) -> dict[str, str]:
    where = f"measured by mw calibrate with {num_devices} virtual devices at work, JAX {version('jax')}"
    return {
        "flops_per_second": f"{where}: forward and gradient products of {len(matmul.SHAPES)} shapes",
        "hbm_bytes_per_second": f"{where}: multiply-add, swiglu, norm, softmax by the passes a plan counts",
        "host_link_bytes_per_second": "the same memory",
        "matmul_efficiency": "1: flops_per_second is what was achieved, not a peak",
        "overlap": "0: device threads and collectives take turns on the same cores",
        "launch_seconds": f"{where}: an almost empty program",
        "network": f"{where}: a line of least relative error through sizes and groups",
    }
