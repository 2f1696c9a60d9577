"""How fast planned servers are load-tested: `mw bench serve --plan` of LLaMA-3-8B on 8 H100s: prints JSON.

    python benchmarks/simulation.py [--requests 20000] [--alike 500] > benchmarks/results/simulation.json

Requests of 512 and 128 tokens at 100 a second. `counted` is what the command does; `step_by_step` looks at
every sequence in every step, on fewer requests, and its ratio is per request over the same requests. Seconds
are of the process, so that other work on the machine counts for little. Asked: an hour of them in 3 s.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace

from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.load import traffic
from meshwright.load.padded import PaddedSteps
from meshwright.load.planned_server import simulated_figures
from meshwright.load.settings import LatencyTargets
from meshwright.load.simulator import Planned, simulate_server
from meshwright.load.traffic import Load
from meshwright.models.presets import load_model
from meshwright.plan.serve.steps import StepSeconds
from meshwright.serve.engine.limits import Limits

RATE, PROMPT, ANSWER, CONTEXT, SLOTS, HOUR = 100.0, 512, 128, 1024, 512, 3600


def load_of(num_requests: int) -> Load:
    lengths = traffic.named_lengths("fixed", PROMPT, ANSWER)
    arrivals = traffic.poisson(RATE, 1, 0)
    chats = traffic.chats(lengths, num_requests, 1, arrivals, 0)
    return Load(traffic.within(chats, CONTEXT, 0), None)


def seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="the speed of mw bench serve --plan")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--alike", type=int, default=500, help="requests that are also taken step by step")
    asked = parser.parse_args()
    limits = Limits.of(SLOTS, CONTEXT)
    layout, machine = Layout.of(tensor=8, compute_dtype="bf16"), catalog.load("h100:1x8")
    most = limits.max_step_tokens(0)
    prices = StepSeconds(load_model("llama-3-8b"), layout, machine, most, CONTEXT)
    steps = PaddedSteps(prices, limits, has_kernels=True)
    server = Planned(limits, steps, idle=steps.idle_seconds)

    def whole() -> None:
        simulated_figures(server, load_of(asked.requests), LatencyTargets())

    counted, few = seconds(whole), load_of(asked.alike)
    pairs = [
        [seconds(lambda one=one: simulate_server(replace(server, counted=one), few)) for one in (True, False)]
        for _ in range(2)
    ][-1]
    document = {
        "benchmark": "simulation",
        "command": f"python benchmarks/simulation.py --requests {asked.requests} --alike {asked.alike}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "requests_per_second": asked.requests / counted,
        "tokens_per_second": asked.requests * (PROMPT + ANSWER) / counted,
        "seconds_of_an_hour": HOUR * RATE * counted / asked.requests,
        "asked_seconds_of_an_hour": 3,
        "step_by_step": {"seconds": pairs[1], "counted_seconds": pairs[0], "ratio": pairs[1] / pairs[0]},
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
