"""What the training loop adds to the bare jitted step on the same batches: prints JSON.

    python benchmarks/step_overhead.py [--rounds 6] [--steps 12] > benchmarks/results/step_overhead.json

Target: at most 5%. Bare steps and steps of the loop alternate in rounds within one process; a
step of the loop is the wall time between two of its reports, reading, logging and all.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

NUM_DEVICES = 8
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402 - the devices are fixed when JAX starts

from meshwright.layout import Layout  # noqa: E402
from meshwright.layout.workload import Workload  # noqa: E402
from meshwright.models.presets import load_model  # noqa: E402
from meshwright.train.data import Batches, Corpus, prepare_corpus  # noqa: E402
from meshwright.train.loop import begin, train  # noqa: E402
from meshwright.train.optimizer import OptimizerConfig  # noqa: E402
from meshwright.train.step import CompiledStep  # noqa: E402


def _bare(step: CompiledStep, corpus: Corpus, num_steps: int) -> list[float]:
    stream = Batches(corpus, "train", batch_sequences=step.batch_sequences, seed=0)
    rows = [step._put(stream.at(number * step.batch_sequences)) for number in range(num_steps + 1)]
    state, seconds = step.init(0), []
    with jax.set_mesh(step.mesh):
        for tokens in rows:
            started = time.perf_counter()
            state, metrics = step.jitted(state, tokens)
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - started)
    return seconds[1:]


def _looped(step: CompiledStep, corpus: Corpus, num_steps: int) -> list[float]:
    reports: list[float] = []
    with tempfile.TemporaryDirectory() as run:
        train(
            Path(run),
            step,
            corpus,
            begin(Path(run), step, corpus),
            num_steps=num_steps + 3,
            on_step=lambda _: reports.append(time.perf_counter()),
        )
    # The last report waits for validation and the checkpoint, the first for the start.
    return [after - before for before, after in pairwise(reports[1:-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    config = load_model("demo")
    workload = Workload(num_sequences=16, seq_len=256)
    optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=2, total_steps=1000)
    layout = Layout.of(fsdp=NUM_DEVICES, weights_dtype="f32", compute_dtype="f32")
    step = CompiledStep(config, layout, workload, optimizer, chip_flops_per_second=1e11)
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare_corpus(
            "stdlib", Path(folder), vocab_size=config.vocab_size, seq_len=workload.seq_len
        )
        pairs = [
            (
                statistics.median(_bare(step, corpus, options.steps)),
                statistics.median(_looped(step, corpus, options.steps)),
            )
            for _ in range(options.rounds)
        ]
    ratios = [looped / bare for bare, looped in pairs]
    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    document = {
        "benchmark": "step_overhead",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {versions}",
        "layout": str(layout),
        "bare_seconds": statistics.median(bare for bare, _ in pairs),
        "loop_seconds": statistics.median(looped for _, looped in pairs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "target_ratio": 1.05,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
