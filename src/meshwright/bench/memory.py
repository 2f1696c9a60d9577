"""How fast the devices stream memory: a multiply-add over arrays in and beyond the caches."""

from collections.abc import Sequence
from dataclasses import dataclass

from jax import Array

from meshwright.bench.devices import Operand, bench_of
from meshwright.bench.matmul import harmonic_mean
from meshwright.bench.timing import Prepared, Progress, Timing, report

SIZES = (1_048_576, 16_777_216)
_PASSES = 3  # two arrays are read and one is written


@dataclass(frozen=True)
class Measured:
    """The time of a multiply-add of float32 arrays of `array_bytes` on every device."""

    array_bytes: int
    timing: Timing

    @property
    def bytes_per_second(self) -> float:
        return _PASSES * self.array_bytes / self.timing.seconds


def prepare(num_devices: int, progress: Progress, sizes: Sequence[int]) -> Prepared[Measured]:
    """The multiply-add over arrays of each size."""
    report(progress, "compiling a multiply-add")
    bench = bench_of(num_devices)
    programs = [bench.program(_multiply_add, [Operand((size // 4,), "f32")] * 2) for size in sizes]
    return Prepared(
        programs,
        lambda timings: [Measured(size, timing) for size, timing in zip(sizes, timings, strict=True)],
    )


def streaming_bytes_per_second(measured: Sequence[Measured]) -> float:
    """Bytes a second of one device: as many bytes at each size, over the seconds they take."""
    return harmonic_mean([one.bytes_per_second for one in measured])


def _multiply_add(x: Array, y: Array) -> Array:
    return 1.5 * x + y
