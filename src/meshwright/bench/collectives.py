"""Collectives over virtual devices: measured at several sizes and groups, and a line through each.

Every point runs inside a loop in one program, as a step runs them inside its scan over layers, with
all devices at work: while one group of two exchanges, so do the others.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jax import Array, lax

from meshwright.bench.devices import Operand, program, virtual_host
from meshwright.bench.fit import fit_line, predict
from meshwright.bench.timing import Prepared, Program, Progress, Timing, report, run
from meshwright.hardware.chip import COLLECTIVES, LinearCost

SIZES = (4096, 262_144, 2_097_152, 8_388_608)
_LOOP_BYTES = 16_777_216  # a loop moves about this much, or 32 small messages, to outlast its launch
_MAX_LOOP = 32
_GROUP = "group"


@dataclass(frozen=True)
class Point:
    """One collective of V = gathered_bytes over groups of `num_devices`."""

    op: str
    num_devices: int
    gathered_bytes: int

    @property
    def priced_bytes(self) -> int:
        """The bytes of hardware.chip.LinearCost: V, or V / n for all_to_all and permute."""
        divisor = self.num_devices if self.op in ("all_to_all", "permute") else 1
        return self.gathered_bytes // divisor

    @property
    def loop_length(self) -> int:
        return max(1, min(_MAX_LOOP, _LOOP_BYTES // self.gathered_bytes))


@dataclass(frozen=True)
class Measured:
    """A point and the time of one run of it."""

    point: Point
    timing: Timing


def bench_collectives(spec: str, progress: Progress = None, sizes: tuple[int, ...] = SIZES) -> dict:
    """Every collective on the devices of `spec` beside its fitted line: `{"hardware", "results"}`.

    A result has op, axes, num_devices, bytes (V), seconds, predicted_seconds, ratio (measured over
    predicted) and spread (interquartile range over the median).
    """
    measured = run(prepare(virtual_host(spec).num_chips, progress, sizes))
    lines = fit_lines(measured)
    return {"hardware": spec, "results": [_result(one, lines[one.point.op]) for one in measured]}


def prepare(num_devices: int, progress: Progress, sizes: tuple[int, ...]) -> Prepared[Measured]:
    """Every collective over groups of 2, 4, ... and all devices, at these sizes V in bytes."""
    points = [Point(op, n, size) for op in COLLECTIVES for n in group_sizes(num_devices) for size in sizes]
    programs: list[Program] = []
    for op in COLLECTIVES:
        report(progress, f"compiling {op} over {num_devices} devices")
        programs += [_program(point, num_devices) for point in points if point.op == op]
    return Prepared(
        programs,
        lambda timings: [Measured(p, t.per(p.loop_length)) for p, t in zip(points, timings, strict=True)],
    )


def group_sizes(num_devices: int) -> list[int]:
    """2, 4 and all devices, where they divide.

    >>> group_sizes(8), group_sizes(2)
    ([2, 4, 8], [2])
    """
    return sorted({n for n in (2, 4, num_devices) if n > 1 and num_devices % n == 0})


def fit_lines(measured: list[Measured]) -> dict[str, LinearCost]:
    """The line of each collective over all its groups and sizes."""
    return {op: _fit([one for one in measured if one.point.op == op]) for op in COLLECTIVES}


def _fit(measured: list[Measured]) -> LinearCost:
    return fit_line([m.point.priced_bytes for m in measured], [m.timing.seconds for m in measured])


def _result(measured: Measured, line: LinearCost) -> dict:
    point, timing = measured.point, measured.timing
    predicted = predict(line, point.priced_bytes)
    return {
        "op": point.op,
        "axes": [_GROUP],
        "num_devices": point.num_devices,
        "bytes": point.gathered_bytes,
        "seconds": timing.seconds,
        "predicted_seconds": predicted,
        "ratio": timing.seconds / predicted,
        "spread": timing.spread,
    }


def _program(point: Point, num_devices: int) -> Program:
    n = point.num_devices
    whole = point.op in ("reduce_scatter", "all_reduce")
    length = point.gathered_bytes // 4 // (1 if whole else n)
    step = _STEPS[point.op]

    def local(x: Array) -> Array:
        return lax.fori_loop(0, point.loop_length, lambda _, x: step(x, n), x)

    return program(local, [Operand((length,), "f32")], num_devices, n)


# One run of each collective, in a form whose result is the next run's operand.


def _all_gather(x: Array, n: int) -> Array:
    return lax.slice(lax.all_gather(x, _GROUP, tiled=True), (0,), (len(x),))


def _all_reduce(x: Array, n: int) -> Array:
    return lax.psum(x, _GROUP)


def _reduce_scatter(x: Array, n: int) -> Array:
    """XLA on CPU turns the reshard of a partial sum into an all-reduce and a slice (JAX 0.10.2)."""
    size = len(x) // n
    shard = lax.dynamic_slice(lax.psum(x, _GROUP), (lax.axis_index(_GROUP) * size,), (size,))
    return lax.dynamic_update_slice(x, shard, (0,))


def _all_to_all(x: Array, n: int) -> Array:
    return lax.all_to_all(x, _GROUP, 0, 0, tiled=True)


def _permute(x: Array, n: int) -> Array:
    return lax.ppermute(x, _GROUP, [(i, (i + 1) % n) for i in range(n)])


_STEPS: dict[str, Callable[[Array, int], Array]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
