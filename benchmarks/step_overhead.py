"""What the training loop adds to the bare jitted step on the same batches: prints JSON.

    python benchmarks/step_overhead.py [--rounds 6] [--steps 12] > benchmarks/results/step_overhead.json

Target: at most 3%. Bare steps and steps of the loop alternate in rounds within one process; a
step of the loop is the wall time between two of its reports, reading, logging and all.
"""

import argparse
import json
import statistics
import time
from itertools import pairwise

from training import demo, machine, reports, use_cpu_devices

NUM_DEVICES = 8
use_cpu_devices(NUM_DEVICES)

import jax  # noqa: E402 - the devices are fixed when JAX starts

from meshwright.layout import Layout  # noqa: E402
from meshwright.train.corpus import Batches, Corpus  # noqa: E402
from meshwright.train.step import CompiledStep  # noqa: E402


def _bare(step: CompiledStep, corpus: Corpus, num_steps: int) -> list[float]:
    stream = Batches(corpus, batch_sequences=step.batch_sequences, seed=0)
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
    reported = [*reports(step, corpus, num_steps + 3).values()]
    # The last report waits for validation and the checkpoint, the first for the start.
    return [after - before for before, after in pairwise(reported[1:-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    layout = Layout.of(fsdp=NUM_DEVICES, weights_dtype="f32", compute_dtype="f32")
    with demo(layout, num_sequences=16) as (step, corpus):
        pairs = [
            (
                statistics.median(_bare(step, corpus, options.steps)),
                statistics.median(_looped(step, corpus, options.steps)),
            )
            for _ in range(options.rounds)
        ]
    ratios = [looped / bare for bare, looped in pairs]
    document = {
        "benchmark": "step_overhead",
        "machine": machine(),
        "layout": str(layout),
        "bare_seconds": statistics.median(bare for bare, _ in pairs),
        "loop_seconds": statistics.median(looped for _, looped in pairs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "target_ratio": 1.03,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
