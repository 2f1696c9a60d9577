"""What users wait for, in five minutes, and what of it has changed since the recorded run: prints JSON.

    python benchmarks/quick.py [--rounds 3] [--rows help,plan_dense] [--against benchmarks/results/quick.json]

A row is a process of its own. Its figure is its CPU seconds over those of `reference`, a fixed mixture of
Python and NumPy that runs just before it, so a slower machine or other work on it counts for both. Rows take
turns, and the figure is the median over the rounds. A row that differs by more than 10% from the recorded run
is listed under `moved`; the exit code is 1 if one is slower.

    import_mw, help     `import meshwright`, `mw --help`
    plan_dense          a search for llama-3-70b on 8,960 chips
    plan_experts        a search for mixtral-8x7b on 128 chips
    plan_serving        the frontier of llama-3-8b on a node
    simulate            a server under 100 requests a second, as in simulation.py
    reshard             the cheapest reshards of 30 pairs of shardings, as in reshard_search.py
    train               20 steps of the demo model on two virtual devices, with the compile
    tokens              80 tokens of 16 streams of a small model in the engine, with the compile
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "quick.json"
MOVED = 0.1
_MW = "from meshwright.cli.main import run; run()"
_FRONTIER = "plan serve --model llama-3-8b --hardware h100:1x8 --prompt-tokens 2k --output-tokens 256"
_SEARCH = "plan train --batch-tokens 4Mi --seq-len 4096 --model"


def reference() -> None:
    import numpy as np

    matrix, table = np.ones((400, 400)), dict.fromkeys(range(1000), 0)
    for _ in range(60):
        matrix = matrix @ matrix / 400
    for number in range(2_000_000):
        table[number % 1000] += number


def train() -> None:
    from training import demo, reports, use_cpu_devices

    use_cpu_devices(2)
    from meshwright.layout import Layout

    with demo(Layout.of(fsdp=2), num_sequences=4) as (step, corpus):
        reports(step, corpus, 20)


def tokens() -> None:
    from engine import SMALL, new_runner, token_seconds

    token_seconds(new_runner(16, 128, SMALL), 16, 32, 80)


FUNCTIONS: dict[str, Callable[[], None]] = {one.__name__: one for one in (reference, train, tokens)}
COMMANDS = {
    "import_mw": ["-c", "import meshwright"],
    "help": ["-c", _MW, "--help"],
    "plan_dense": ["-c", _MW, *_SEARCH.split(), "llama-3-70b", "--hardware", "v5p:16x20x28"],
    "plan_experts": ["-c", _MW, *_SEARCH.split(), "mixtral-8x7b", "--hardware", "h100:16x8"],
    "plan_serving": ["-c", _MW, *_FRONTIER.split()],
    "simulate": [str(HERE / "simulation.py"), "--requests", "4000", "--alike", "50"],
    "reshard": [str(HERE / "reshard_search.py"), "--pairs", "30"],
    **{name: [__file__, "--one", name] for name in ("train", "tokens")},
}


def cpu_seconds(arguments: Sequence[str]) -> float:
    """CPU seconds of one process of this Python."""
    before = os.times()
    subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def moved(figures: dict[str, float], recorded: dict[str, float]) -> dict[str, float]:
    """The rows that differ by more than MOVED, each with today's figure over the recorded one."""
    ratios = {name: figures[name] / recorded[name] for name in figures if name in recorded}
    return {name: ratio for name, ratio in ratios.items() if not 1 / (1 + MOVED) <= ratio <= 1 + MOVED}


def main() -> None:
    parser = argparse.ArgumentParser(description="what users wait for, and what of it has changed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default=",".join(COMMANDS), help="the rows to run")
    parser.add_argument("--against", type=Path, default=RESULTS, help="a recorded run")
    parser.add_argument("--one", choices=list(FUNCTIONS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        return FUNCTIONS[asked.one]()
    from training import machine

    ratios: dict[str, list[float]] = {name: [] for name in asked.rows.split(",")}
    seconds: dict[str, list[float]] = {name: [] for name in ratios}
    for _ in range(asked.rounds):
        for name in ratios:
            base = cpu_seconds([__file__, "--one", "reference"])
            seconds[name].append(cpu_seconds(COMMANDS[name]))
            ratios[name].append(seconds[name][-1] / base)
    figures = {name: statistics.median(each) for name, each in ratios.items()}
    recorded = json.loads(asked.against.read_text())["ratios"] if asked.against.exists() else {}
    changed = moved(figures, recorded)
    document = {
        "benchmark": "quick",
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        "rounds": asked.rounds,
        "ratios": figures,
        "cpu_seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "moved": changed,
    }
    print(json.dumps(document, indent=1))
    sys.exit(any(ratio > 1 for ratio in changed.values()))


if __name__ == "__main__":
    main()
