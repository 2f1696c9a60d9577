"""The bubble of every pipeline schedule, measured with simulated durations, beside the planner's simulation.

    python benchmarks/pipeline_bubble.py [SCHEDULE ...]    # results/pipeline_bubble.json

Eight stages on eight virtual CPU devices share this machine's cores, so that their overlap cannot be timed.
Instead every program of every stage is timed alone (the median of its runs), and the loop that trains
(nn/pipeline/controller.py) then runs a step in which each stage has a clock of its own: a program begins
when its stage is free and its inputs are there, and takes its measured seconds. The bubble is the share of
the stages' time in which they idle until the last pass ends. Simulated: cost/pipeline/simulate.py with the
same table and, as calibration, the measured seconds of F, B and W at every depth; a whole backward pass and
a joined pair take their sums there, while the loop has programs of their own for them. `lanes` is one
program and has no loop.
"""

import argparse
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.cost.pipeline import PassSeconds, Times
from meshwright.cost.pipeline.simulate import simulate
from meshwright.files import write_whole
from meshwright.layout import Layout
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.pipelines.pass_table import Place
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.nn.pipeline.controller import OnDevices
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.stage_step import StagedStep

RESULTS = Path(__file__).parent / "results/pipeline_bubble.json"
STAGES, MICROBATCHES, SEQ_LEN, NUM_TIMED = 8, 16, 128, 3
MODEL = ModelConfig(
    name="pipeline",
    num_layers=16,
    d_model=256,
    d_ff=1024,
    num_heads=8,
    num_kv_heads=8,
    d_head=32,
    vocab_size=512,
    max_seq_len=SEQ_LEN,
)
LIMIT = 0.15


class Timed(OnDevices):
    """Runs programs one at a time. seconds: of each, by the devices of its stage."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[Mesh, Any], list[float]] = defaultdict(list)

    def run(self, mesh: Mesh, program: Any, *arguments: Any) -> Any:
        started = time.perf_counter()
        found = super().run(mesh, program, *arguments)
        self.seconds[mesh, program].append(time.perf_counter() - started)
        return found


class OnClocks(OnDevices):
    """Runs programs, each of which takes given seconds on the clock of its stage.

    ready: when each array is there, by identity; kept: those arrays. free: when each stage is.
    """

    def __init__(self, seconds: dict[tuple[Mesh, Any], float]) -> None:
        self.seconds = seconds
        self.ready: dict[int, float] = {}
        self.kept: list[Any] = []
        self.free: dict[Mesh, float] = defaultdict(float)
        self.busy = 0.0

    def run(self, mesh: Mesh, program: Any, *arguments: Any) -> Any:
        came = max((self.ready.get(id(x), 0.0) for x in jax.tree.leaves(arguments)), default=0.0)
        self.kept.append(arguments)
        found = super().run(mesh, program, *arguments)
        self.free[mesh] = max(came, self.free[mesh]) + self.seconds[mesh, program]
        self.busy += self.seconds[mesh, program]
        return self._made(found, lambda _: self.free[mesh])

    def send(self, tree: Any, mesh: Mesh, what: str) -> Any:
        sent = super().send(tree, mesh, what)
        came = dict(zip(map(id, jax.tree.leaves(sent)), jax.tree.leaves(tree), strict=True))
        return self._made(sent, lambda x: self.ready.get(id(came[id(x)]), 0.0))

    def _made(self, tree: Any, when: Any) -> Any:
        self.kept.append(tree)
        self.ready |= {id(x): when(x) for x in jax.tree.leaves(tree)}
        return tree


def measured(schedule: str) -> dict[str, Any]:
    """The bubble of one schedule, measured and simulated."""
    interleave = 2 if schedule == "interleaved" else 1
    layout = Layout.of(
        pipe=STAGES,
        microbatches=MICROBATCHES,
        schedule=schedule,
        interleave=interleave,
        weights_dtype="f32",
        compute_dtype="f32",
    )
    optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=1, total_steps=2)
    workload = Workload(MICROBATCHES, SEQ_LEN)
    step = StagedStep(MODEL, layout, workload, optimizer, chip_flops_per_second=1e11)
    dispatch = step.dispatch
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (MICROBATCHES, SEQ_LEN + 1), np.int32)
    rows = [stage.put(tokens) for stage in step.stages]
    weights = step._read(OnDevices(), [own.params for own in step.init(0)])
    dispatch.totals(weights, rows, OnDevices())  # compiles
    timed = Timed()
    for _ in range(NUM_TIMED):
        dispatch.totals(weights, rows, timed)
    seconds = {key: median(found) for key, found in timed.seconds.items()}
    # Zeros that gradients are added to are made before the first pass.
    before = {(dispatch.meshes[place.stage], dispatch.programs[(place, "nothing_yet"),]) for place in weights}
    seconds |= dict.fromkeys(before, 0.0)
    clocks = OnClocks(seconds)
    dispatch.totals(weights, rows, clocks)
    makespan = max(clocks.free.values())

    def of(place: Place, name: str) -> float | None:
        program = dispatch.programs.get(((place, name),))
        return program and seconds[dispatch.meshes[place.stage], program]

    # Under DualPipe two stages have each depth, one of either direction.
    depths = [_pass_seconds(places, of) for places in zip(*dispatch.table.routes, strict=True)]
    simulated = simulate(dispatch.table, Times(depths)).bubble_share
    found = 1 - clocks.busy / (STAGES * makespan)
    return {
        "schedule": schedule,
        "layout": str(layout),
        "measured": found,
        "simulated": simulated,
        "ratio": found / simulated,
        "makespan_seconds": makespan,
        "depth_seconds": [one._asdict() for one in depths],
    }


def _pass_seconds(places: Sequence[Place], of: Any) -> PassSeconds:
    """F, B and W of a depth, means of its places; B is the whole backward pass where no stage splits it."""

    def mean_of(name: str) -> float | None:
        found = [seconds for place in places if (seconds := of(place, name)) is not None]
        return mean(found) if found else None

    backward, weight = mean_of("input_gradient"), mean_of("weight_gradient")
    if backward is None or weight is None:
        backward, weight = mean_of("backward"), 0.0
    forward = mean_of("forward")
    assert forward is not None and backward is not None, f"{places} never run a pass alone"
    return PassSeconds(forward, backward, weight)


def write(rows: list[dict[str, Any]]) -> None:
    """The results so far, in the order of the schedules."""
    document = {
        "method": "simulated durations: programs timed alone, clocks per stage",
        "environment": {"jax": jax.__version__, "platform": f"{platform.machine()}, {os.cpu_count()} cores"},
        "limit": LIMIT,
        "outside": [row["schedule"] for row in rows if abs(row["ratio"] - 1) > LIMIT],
        "results": rows,
    }
    write_whole(RESULTS, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("schedules", nargs="*", help="to measure anew; by default all")
    asked = parser.parse_args().schedules
    before = json.loads(RESULTS.read_text())["results"] if asked and RESULTS.exists() else []
    found = {row["schedule"]: row for row in before}
    for name in SCHEDULES:
        if name != "lanes" and name in (asked or SCHEDULES):
            found[name] = row = measured(name)
            print(f"{name:12} measured {row['measured']:.3f} simulated {row['simulated']:.3f}", flush=True)
            write([found[one] for one in SCHEDULES if one in found])
