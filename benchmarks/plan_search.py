"""How long the search for a layout takes, and how much memory: prints JSON.

    python benchmarks/plan_search.py [--rounds 3] > benchmarks/results/plan_search.json

Every search runs in a process of its own, imports included in its memory and not in its seconds. Seconds
are CPU seconds of one core, the median of the rounds, since others may use the machine. Targets: at least
10,000 layouts considered in less than 2 s and 300 MB; mixtures of experts are shown beside them.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys

# model, hardware, tokens of a step, tokens of a sequence, has targets
CASES = [
    ("llama-3.1-405b", "h100:2048x8", 2**24, 8192, True),
    ("llama-3-70b", "v5p:16x20x28", 4_000_000, 4096, True),
    ("mixtral-8x7b", "h100:16x8", 2**22, 4096, False),
    ("deepseek-v3", "h100:256x8", 15360 * 4096, 4096, False),
]
TARGETS = {"layouts": 10_000, "seconds": 2.0, "megabytes": 300}


def one(model: str, hardware: str, batch_tokens: int, seq_len: int) -> dict:
    """A search in this process."""
    import resource
    import time

    from meshwright.hardware.catalog import load
    from meshwright.layout.workload import Workload
    from meshwright.models.presets import load_model
    from meshwright.plan.train import search

    workload = Workload(round(batch_tokens / seq_len), seq_len)
    started = time.process_time()
    found = search(
        load_model(model),
        load(hardware),
        workload,
        weights_dtype="bf16",
        compute_dtypes=("bf16",),
        runnable=False,
    )
    return {
        "layouts": found.considered,
        "seconds": time.process_time() - started,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "best": str(found.candidates[0].layout),
    }


def measured(case: tuple, rounds: int) -> dict:
    model, hardware, batch_tokens, seq_len, has_targets = case
    command = [sys.executable, __file__, "--one", json.dumps(case[:4])]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(rounds)
    ]
    figures = {
        "layouts": runs[0]["layouts"],
        "seconds": statistics.median(run["seconds"] for run in runs),
        "megabytes": max(run["megabytes"] for run in runs),
    }
    return {
        "model": model,
        "hardware": hardware,
        "batch_tokens": batch_tokens,
        "seq_len": seq_len,
        **figures,
        "layouts_per_second": figures["layouts"] / figures["seconds"],
        "best": runs[0]["best"],
        "meets_targets": _meets(figures) if has_targets else None,
    }


def _meets(figures: dict) -> bool:
    enough = figures["layouts"] >= TARGETS["layouts"]
    return enough and all(figures[key] < TARGETS[key] for key in ("seconds", "megabytes"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*json.loads(options.one))))
        return
    document = {
        "benchmark": "plan_search",
        "command": f"python benchmarks/plan_search.py --rounds {options.rounds}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "targets": TARGETS,
        "searches": [measured(case, options.rounds) for case in CASES],
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
