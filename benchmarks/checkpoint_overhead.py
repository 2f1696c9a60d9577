"""What a checkpoint in the background every 100 steps adds to training: prints JSON.

    python benchmarks/checkpoint_overhead.py [--rounds 5] > benchmarks/results/checkpoint_overhead.json

Target: under 2% of the time of 100 steps. Runs of 40 steps with a checkpoint every 10 and with none alternate
within one process. The wall time runs from the report of step 5 to that of step 35, so that three checkpoints
lie within it, and neither compiling nor the checkpoint at the end does; what one of them adds is set against
100 steps.
"""

import argparse
import json
import statistics

from training import demo, machine, reports, use_cpu_devices

use_cpu_devices(1)

import jax  # noqa: E402 - the devices are fixed when JAX starts

from meshwright.layout import Layout  # noqa: E402
from meshwright.train.data import Corpus  # noqa: E402
from meshwright.train.loop import Rhythm  # noqa: E402
from meshwright.train.step import CompiledStep  # noqa: E402

STEPS, FIRST, LAST, EVERY = 40, 5, 35, 10
TARGET_EVERY = 100


def seconds(step: CompiledStep, corpus: Corpus, checkpoint_every: int) -> float:
    """Wall seconds from the report of step FIRST to that of step LAST."""
    reported = reports(step, corpus, STEPS, rhythm=Rhythm(checkpoint_every=checkpoint_every))
    return reported[LAST] - reported[FIRST]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    layout = Layout.of(weights_dtype="f32", compute_dtype="f32")
    with demo(layout, num_sequences=8) as (step, corpus):
        seconds(step, corpus, 0)  # compiles
        rounds = [(seconds(step, corpus, 0), seconds(step, corpus, EVERY)) for _ in range(options.rounds)]
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(step.init(0)))
    steps = LAST - FIRST
    checkpoints = LAST // EVERY - FIRST // EVERY
    shares = [(saving - plain) / checkpoints / (plain / steps * TARGET_EVERY) for plain, saving in rounds]
    document = {
        "benchmark": "checkpoint_overhead",
        "machine": machine(),
        "state_bytes": state_bytes,
        "step_seconds": statistics.median(plain for plain, _ in rounds) / steps,
        "overhead": statistics.median(shares),
        "overheads": shares,
        "target": 0.02,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
