"""Memory bandwidth of the devices: a multiply-add over arrays smaller and larger than the caches."""

from collections.abc import Sequence
from dataclasses import dataclass

from jax import Array

from meshwright.bench.all_devices import Operand, bench_of
from meshwright.bench.matmul import harmonic_mean
from meshwright.bench.regression import rates
from meshwright.bench.timing import Listener, Prepared, Timing, tell
from meshwright.dtypes import COMPUTED, dtype_bytes
from meshwright.points import Points

CPU_ARRAYS = (1_048_576, 16_777_216)
# Larger than the caches of any accelerator, and small enough for the memory of all.
ACCELERATOR_ARRAYS = (16_777_216, 134_217_728, 536_870_912)
_PASSES = 3  # two arrays are read and one is written


@dataclass(frozen=True)
class MeasuredMemory:
    """The time of a multiply-add of arrays of `array_bytes` on every device."""

    dtype: str
    array_bytes: int
    timing: Timing

    @property
    def touched_bytes(self) -> int:
        return _PASSES * self.array_bytes

    @property
    def bytes_per_second(self) -> float:
        return self.touched_bytes / self.timing.seconds


def prepare(num_devices: int, progress: Listener, sizes: Sequence[int]) -> Prepared[MeasuredMemory]:
    """The multiply-add over arrays of each size in every dtype."""
    tell(progress, "compiling a multiply-add")
    bench = bench_of(num_devices)
    points = [(dtype, size) for dtype in COMPUTED for size in sizes]
    operands = [Operand((int(size / dtype_bytes(dtype)),), dtype) for dtype, size in points]
    programs = [bench.program(_multiply_add, [operand] * 2) for operand in operands]
    return Prepared(
        programs,
        lambda timings: [
            MeasuredMemory(*point, timing) for point, timing in zip(points, timings, strict=True)
        ],
    )


def streaming_bytes_per_second(measured: Sequence[MeasuredMemory]) -> float:
    """Bytes a second of a device in float32: the harmonic mean over the sizes."""
    return harmonic_mean([memory.bytes_per_second for memory in measured if memory.dtype == "f32"])


def memory_rates(measured: Sequence[MeasuredMemory]) -> dict[str, Points]:
    """Bytes a second by the bytes touched, for each dtype."""
    return {
        dtype: rates([m.touched_bytes for m in ours], [m.bytes_per_second for m in ours])
        for dtype in COMPUTED
        if (ours := [m for m in measured if m.dtype == dtype])
    }


def _multiply_add(x: Array, y: Array) -> Array:
    return x * 1.5 + y
