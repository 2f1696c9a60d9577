"""How well a calibrated machine predicts collectives that it was not calibrated on: prints JSON.

    python benchmarks/calibration.py [--devices 8] [--rounds 7] > benchmarks/results/calibration.json

Fitted on the axes of one mesh at some sizes; held out are the axes of another mesh, alone and
together, at sizes between. Both are timed in the same rounds, since other work may share
the machine. Target: a median error of 25% for 64 KB and up.
"""

import argparse
import json
import os
import platform
import statistics
from importlib.metadata import version

HELD_OUT_SIZES = (131_072, 524_288, 2_097_152, 8_388_608, 25_165_824)
TARGET = 0.25


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--points", action="store_true", help="list every point, fitted and held out")
    return parser.parse_args()


def _point(one, predicted_seconds: float) -> dict:
    return {
        "op": one.point.op,
        "axes": "".join(one.point.axes),
        "num_devices": one.point.num_devices,
        "bytes": one.point.gathered_bytes,
        "seconds": one.timing.seconds,
        "predicted_seconds": predicted_seconds,
        "spread": one.timing.spread,
    }


def main() -> None:
    options = _options()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"
    from meshwright.bench import collective_times
    from meshwright.bench.all_devices import local_hardware
    from meshwright.bench.measured_hardware import predicted, with_collectives
    from meshwright.bench.sizes import CALIBRATION, group_mesh
    from meshwright.bench.timing import run_together
    from meshwright.notation.mesh import Mesh

    hardware = local_hardware(f"cpu:{options.devices}")
    held_mesh = Mesh({"A": 2, "B": options.devices // 4, "C": 2})
    load = os.getloadavg()[0]
    fitted, held = run_together(
        [
            collective_times.prepare(group_mesh(options.devices), None, CALIBRATION),
            collective_times.prepare(held_mesh, None, HELD_OUT_SIZES),
        ],
        options.rounds,
    )
    model = with_collectives(hardware, fitted)
    points = [_point(one, predicted(model, one).seconds) for one in held]
    errors = {
        op: [abs(p["predicted_seconds"] / p["seconds"] - 1) for p in points if p["op"] == op]
        for op in sorted({p["op"] for p in points})
    }
    everything = [error for found in errors.values() for error in found]
    document = {
        "benchmark": "calibration",
        "command": f"python benchmarks/calibration.py --devices {options.devices} --rounds {options.rounds}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, JAX {version('jax')}",
        "load_average": load,
        "fitted_on": {"mesh": dict(fitted[0].point.mesh.sizes), "bytes": list(CALIBRATION)},
        "held_out": {"mesh": dict(held_mesh.sizes), "bytes": list(HELD_OUT_SIZES), "points": len(points)},
        "target_median_error": TARGET,
        "median_error": statistics.median(everything),
        "median_error_by_op": {op: statistics.median(found) for op, found in errors.items()},
        "share_of_points_within_target": sum(error <= TARGET for error in everything) / len(everything),
        "median_spread": statistics.median(p["spread"] for p in points),
    }
    if options.points:
        document["points"] = points
        document["fitted_points"] = [_point(one, predicted(model, one).seconds) for one in fitted]
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
