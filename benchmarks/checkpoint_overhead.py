"""What a checkpoint in the background every 100 steps adds to training: prints JSON.

    python benchmarks/checkpoint_overhead.py [--rounds 5] > benchmarks/results/checkpoint_overhead.json

Target: under 2% of the time of 100 steps. Runs of 200 steps with and without checkpoints alternate within
one process; the wall time runs from the report of step 10 to that of step 190, so that one checkpoint (at
step 100) lies wholly within it, and neither compiling nor the checkpoint at the end does.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

NUM_DEVICES = 1
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402 - the devices are fixed when JAX starts

from meshwright.layout import Layout  # noqa: E402
from meshwright.layout.workload import Workload  # noqa: E402
from meshwright.models.presets import load_model  # noqa: E402
from meshwright.train.data import Corpus, prepare_corpus  # noqa: E402
from meshwright.train.loop import Rhythm, begin, train  # noqa: E402
from meshwright.train.optimizer import OptimizerConfig  # noqa: E402
from meshwright.train.step import CompiledStep  # noqa: E402

STEPS, FIRST, LAST, EVERY = 200, 10, 190, 100


def seconds(step: CompiledStep, corpus: Corpus, checkpoint_every: int) -> float:
    """Wall seconds from the report of step FIRST to that of step LAST."""
    reports: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as run:
        train(
            Path(run),
            step,
            corpus,
            begin(Path(run), step, corpus),
            num_steps=STEPS,
            rhythm=Rhythm(checkpoint_every=checkpoint_every),
            on_step=lambda line: reports.__setitem__(line["step"], time.perf_counter()),
        )
    return reports[LAST] - reports[FIRST]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    config = load_model("demo")
    workload = Workload(num_sequences=8, seq_len=256)
    optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=2, total_steps=1000)
    layout = Layout.of(data=NUM_DEVICES, weights_dtype="f32", compute_dtype="f32")
    step = CompiledStep(config, layout, workload, optimizer, chip_flops_per_second=1e11)
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare_corpus(
            "stdlib", Path(folder), vocab_size=config.vocab_size, seq_len=workload.seq_len
        )
        seconds(step, corpus, 0)  # compiles
        rounds = [(seconds(step, corpus, 0), seconds(step, corpus, EVERY)) for _ in range(options.rounds)]
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(step.init(0)))
    steps = LAST - FIRST
    # One checkpoint in `steps` steps; what it costs is spread over EVERY.
    shares = [(saving - plain) / (plain / steps) / EVERY for plain, saving in rounds]
    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    document = {
        "benchmark": "checkpoint_overhead",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {versions}",
        "state_bytes": state_bytes,
        "step_seconds": statistics.median(plain for plain, _ in rounds) / steps,
        "overhead": statistics.median(shares),
        "overheads": shares,
        "target": 0.02,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
