"""How soon the planning half answers, as whole processes: prints JSON.

    python benchmarks/startup.py [--runs 9] > benchmarks/results/startup.json

Targets: `import meshwright` and `mw --help` under 0.5 s without JAX; `mw plan train` for
llama-3-70b on v5p:16x20x28 under 1 s. Runs of the commands are interleaved; medians are quoted.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

_MW = "from meshwright.cli.main import run; run()"
_JAX = "import sys; assert not {'jax', 'jaxlib'} & set(sys.modules)"
_PLAN = "plan train --model llama-3-70b --hardware v5p:16x20x28 --batch-tokens {} --seq-len 4096 --json"

COMMANDS = {
    "python": (["-c", "pass"], None),
    "import_meshwright": (["-c", f"import meshwright; {_JAX}"], 0.5),
    "mw_help": (["-c", _MW, "--help"], 0.5),
    "mw_plan_train_4M": (["-c", _MW, *_PLAN.format("4M").split()], 1.0),
    "mw_plan_train_16M": (["-c", _MW, *_PLAN.format("16M").split()], 1.0),
}


def _seconds(arguments: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one process."""
    before, started = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - started, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for number in range(runs + 1):  # the first round fills the file cache
        for name, (arguments, _) in COMMANDS.items():
            figure = _seconds(arguments)
            if number:
                measured[name].append(figure)
    results = [
        {
            "name": name,
            "wall_seconds": statistics.median(wall for wall, _ in figures),
            "cpu_seconds": statistics.median(cpu for _, cpu in figures),
            "target_seconds": COMMANDS[name][1],
        }
        for name, figures in measured.items()
    ]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    document = {"benchmark": "startup", "machine": machine, "runs": runs, "results": results}
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
