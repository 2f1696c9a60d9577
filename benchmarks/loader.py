"""How many tokens a second the loader hands to a step, of one source and of a mixture of two: prints JSON.

    python benchmarks/loader.py [--rounds 5] > benchmarks/results/loader.json

Target: never the bound at 100,000 tokens a second, so `headroom` (tokens a second over that) is to be above
1; 20 leaves 5% of a step's time to the loader even where nothing overlaps. Batches of 8 rows of 2,048
tokens are read in shuffled order from 400 MB of packed rows on the disk, in the thread that dispatches steps.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from training import machine

from meshwright.train.corpus import Batches, Corpus

NUM_ROWS, SEQ_LEN, BATCH, NUM_BATCHES = 100_000, 2048, 8, 400
TARGET = 100_000


def corpus(folder: Path, weights: list[float]) -> Corpus:
    """Packed rows of random ids, as many in all whatever the number of sources."""
    names = ["train", *(f"train.{number}" for number in range(1, len(weights)))]
    generator, num_rows = np.random.default_rng(0), NUM_ROWS // max(1, len(names))
    for name in names:
        rows = generator.integers(0, 2**16, (num_rows, SEQ_LEN + 1), dtype=np.uint16)
        np.save(folder / f"{name}.npy", rows)
    np.save(folder / "validation.npy", np.zeros((1, SEQ_LEN + 1), np.uint16))
    return Corpus(
        directory=folder,
        source="random",
        fingerprint="",
        vocab_size=2**16,
        seq_len=SEQ_LEN,
        end_of_text_id=0,
        num_bytes=0,
        num_train_documents=0,
        num_validation_documents=0,
        num_train_tokens=NUM_ROWS * (SEQ_LEN + 1),
        num_validation_tokens=SEQ_LEN + 1,
        unigram_entropy=0.0,
        sha256=dict.fromkeys([*names, "validation"], ""),
        weights=weights,
    )


def tokens_per_second(stream: Batches, first: int) -> float:
    started = time.perf_counter()
    for number in range(NUM_BATCHES):
        stream.at((first + number) * BATCH)
    return NUM_BATCHES * BATCH * SEQ_LEN / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        streams = {
            "one_source": Batches(corpus(Path(one), []), batch_sequences=BATCH, seed=0),
            "mixture_of_two": Batches(corpus(Path(two), [3.0, 1.0]), batch_sequences=BATCH, seed=0),
        }
        rates: dict[str, list[float]] = {name: [] for name in streams}
        for number in range(options.rounds):
            for name, stream in streams.items():
                rates[name].append(tokens_per_second(stream, number * NUM_BATCHES))
    document = {
        "benchmark": "loader",
        "machine": machine(),
        "tokens_per_second": {name: statistics.median(found) for name, found in rates.items()},
        "headroom": {name: min(found) / TARGET for name, found in rates.items()},
        "target_tokens_per_second": TARGET,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
