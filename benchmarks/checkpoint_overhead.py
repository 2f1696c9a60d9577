"""What a checkpoint in the background every 100 steps adds to training: prints JSON.

    python benchmarks/checkpoint_overhead.py [--rounds 5] > benchmarks/results/checkpoint_overhead.json

Target: under 2% of the time of 100 steps. One run saves every 10 steps. The 5 steps after each save, within
which it is written, are set against the 5 after those, which have nothing beside them: so a machine that
slows down slows both. What one checkpoint adds is set against 100 steps. The first save and the steps before
it, which compile, are left out.
"""

import argparse
import json
import statistics

from training import demo, machine, reports, use_cpu_devices

use_cpu_devices(1)

import jax  # noqa: E402 - the devices are fixed when JAX starts

from meshwright.layout import Layout  # noqa: E402
from meshwright.train.corpus import Corpus  # noqa: E402
from meshwright.train.loop import Rhythm  # noqa: E402
from meshwright.train.step import CompiledStep  # noqa: E402

EVERY, HALF = 10, 5
TARGET_EVERY = 100


def halves(step: CompiledStep, corpus: Corpus, rounds: int) -> list[tuple[float, float]]:
    """Wall seconds of the steps with a save beside them and of as many without, for each round."""
    num_steps = EVERY * (rounds + 2)
    at = reports(step, corpus, num_steps, rhythm=Rhythm(checkpoint_every=EVERY))
    saves = range(2 * EVERY, num_steps, EVERY)
    return [(at[save + HALF] - at[save], at[save + EVERY] - at[save + HALF]) for save in saves]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    layout = Layout.of(weights_dtype="f32", compute_dtype="f32")
    with demo(layout, num_sequences=4) as (step, corpus):
        rounds = halves(step, corpus, options.rounds)
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(step.init(0)))
    step_seconds = statistics.median(plain for _, plain in rounds) / HALF
    shares = [(saving - plain) / (plain / HALF * TARGET_EVERY) for saving, plain in rounds]
    document = {
        "benchmark": "checkpoint_overhead",
        "machine": machine(),
        "state_bytes": state_bytes,
        "step_seconds": step_seconds,
        "overhead": statistics.median(shares),
        "overheads": shares,
        "target": 0.02,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
