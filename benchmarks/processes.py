"""Four processes beside one process with four devices: prints JSON.

    python benchmarks/processes.py [--rounds 3] [--steps 40] > benchmarks/results/processes.json

The tiny plan of `Runs` under data=2,fsdp=2, trained by `mw train` and by `mw launch local -n 4`, in
turns. Target: losses equal to 1e-6. Tokens/s are those of the metrics, of the last half of the steps.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from training import machine

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.train.processes import Runs  # noqa: E402

NUM_PROCESSES = 4
TARGET = 1e-6


def lines(run: Path) -> list[dict[str, float]]:
    """The steps of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def tokens_per_second(run: Path) -> float:
    """The median of the last half of the steps: none of them compiles."""
    found = [line["tokens_per_second"] for line in lines(run)]
    return statistics.median(found[len(found) // 2 :])


def difference(one: Path, other: Path) -> float:
    """The largest difference of a step's loss, as a share of it."""
    pairs = zip(lines(one), lines(other), strict=True)
    return max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), f"cpu:{NUM_PROCESSES}", "data=2,fsdp=2")
        for number in range(asked.rounds):
            one, four = (Path(folder) / f"{name}{number}" for name in ("one", "four"))
            steps = ("--steps", str(asked.steps))
            runs.mw(*runs.begin(one, *steps))
            runs.mw("launch", "local", "-n", str(NUM_PROCESSES), "--", "mw", *runs.begin(four, *steps))
            rounds.append((tokens_per_second(one), tokens_per_second(four), difference(one, four)))
    document = {
        "benchmark": "processes",
        "command": f"python benchmarks/processes.py {' '.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "one_process_tokens_per_second": statistics.median(one for one, _, _ in rounds),
        "four_processes_tokens_per_second": statistics.median(four for _, four, _ in rounds),
        "ratio": statistics.median(four / one for one, four, _ in rounds),
        "largest_difference_of_a_loss": max(apart for _, _, apart in rounds),
        "target_difference": TARGET,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
