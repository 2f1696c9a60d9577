"""A sweep of all collectives over all choices of a mesh's axes, within a budget."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from meshwright.bench import collective_times
from meshwright.bench.all_devices import free_bytes, local_hardware
from meshwright.bench.collective_times import MeasuredCollective
from meshwright.bench.measured_hardware import predicted, with_collectives
from meshwright.bench.regression import fit_line
from meshwright.bench.sizes import SWEEP
from meshwright.bench.timing import Listener, run_within, tell
from meshwright.errors import DeviceError, LayoutError
from meshwright.notation.mesh import Mesh
from meshwright.units import format_bytes

# A device may hold this number of arrays of V bytes at once: operand, copy in the loop, result and scratch.
_COPIES = 6
# A round of the next size may take about this factor longer, and so may compiling and warming up.
_GROWTH = 4


def sweep(
    spec: str, mesh: Mesh, progress: Listener = None, sizes: Sequence[int] = SWEEP, max_seconds: float = 120.0
) -> dict[str, Any]:
    """Measured times and the model fitted to them: `{"hardware", "mesh", "fits", "results", "left_out"}`.

    Sizes V go up until memory or `max_seconds` are used up. `left_out` has the sizes that were not
    measured, with the reason. A result has op, axes, num_devices, bytes, seconds, predicted_seconds, ratio
    (measured over predicted) and spread (interquartile range over median). A fit is the latency and
    the bandwidth of one collective over one choice of axes. With several processes, only the first one's
    figures are valid. Raises LayoutError for a mesh of another number of devices, DeviceError if JAX does
    not have them.
    """
    hardware = local_hardware(spec)
    hardware.place(mesh)
    if mesh.num_devices < 2:
        raise LayoutError(f"mesh {mesh}: one device has no collectives")
    measured, left_out = _measure(mesh, free_bytes(hardware), progress, sorted(sizes), max_seconds)
    if not measured:
        asked = ", ".join(map(format_bytes, sizes))
        raise DeviceError(
            f"no size to measure of {asked}: too small to split over {mesh}, or too large for memory"
        )
    model = with_collectives(hardware, measured)
    return {
        "hardware": spec,
        "mesh": dict(mesh.sizes),
        "platform": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
        "fits": list(_fits(measured)),
        "results": [_result(point, predicted(model, point).seconds) for point in measured],
        "left_out": left_out,
    }


def _measure(
    mesh: Mesh, free: int, progress: Listener, sizes: Sequence[int], max_seconds: float
) -> tuple[list[MeasuredCollective], list[dict[str, Any]]]:
    """The measured points, and the sizes beyond the budget: `{"bytes", "reason"}`."""
    started, round_seconds = time.perf_counter(), 0.0
    measured: list[MeasuredCollective] = []
    left_out: list[dict[str, Any]] = []
    most_bytes = _agreed(free / _COPIES)
    for size in sizes:
        left = _agreed(max_seconds - (time.perf_counter() - started))
        if size > most_bytes:
            left_out.append({"bytes": size, "reason": "memory"})
        elif measured and left <= round_seconds * _GROWTH:
            left_out.append({"bytes": size, "reason": "time"})
        else:
            prepared = collective_times.prepare(mesh, progress, [size])
            tell(progress, f"timing {len(prepared.programs)} programs of {size} bytes")
            if not prepared.programs:
                continue
            of_size, round_seconds = run_within(prepared, left / _GROWTH, _agreed)
            measured += of_size
    return measured, left_out


def _fits(measured: Sequence[MeasuredCollective]) -> Iterator[dict[str, Any]]:
    """The line of each collective over each choice of axes."""
    keys = dict.fromkeys((m.point.op, m.point.axes, m.point.num_devices) for m in measured)
    for op, axes, num_devices in keys:
        ours = [m for m in measured if (m.point.op, m.point.axes) == (op, axes)]
        line = fit_line([m.point.priced_bytes for m in ours], [m.timing.seconds for m in ours])
        yield {
            "op": op,
            "axes": list(axes),
            "num_devices": num_devices,
            "latency_seconds": line.latency_seconds,
            "bytes_per_second": line.bytes_per_second,
        }


def _result(measured: MeasuredCollective, predicted_seconds: float) -> dict[str, Any]:
    point, timing = measured.point, measured.timing
    return {
        "op": point.op,
        "axes": list(point.axes),
        "num_devices": point.num_devices,
        "bytes": point.gathered_bytes,
        "seconds": timing.seconds,
        "predicted_seconds": predicted_seconds,
        "ratio": timing.seconds / predicted_seconds,
        "spread": timing.spread,
    }


def _agreed(number: float) -> float:
    """The first process's number, in all processes: they must run the same programs."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return float(multihost_utils.broadcast_one_to_all(np.float32(number)))
