"""How many contractions a second get their cheapest strategy out of all there are: prints JSON.

    python benchmarks/contractions.py > benchmarks/results/contractions.json

Random two-operand einsums (matrices for the most part, else with a batch letter, two contracting or
two free letters a side) of random shardings on Mesh({'X': 4, 'Y': 4, 'Z': 4}) of v5p:4x4x4; each mesh
axis splits any dimension of each array or none, in any order, and one output in four is left open.
All roles are bounded from below and priced until none that is left can be cheaper; the tests
compare with pricing every one. `listed` are those of which all strategies are kept that no other one
beats, as `mw shard` shows them. One process on one core; no JAX. The first round starts with empty
caches, as a new process does; the others find other contractions of the same kind.
Target: 2,000 contractions a second.
"""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import time

from meshwright.cost.strategies import cheapest, strategies
from meshwright.cost.strategy import Question
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import Einsum
from meshwright.notation.mesh import Mesh

MESH = Mesh({"X": 4, "Y": 4, "Z": 4})
HARDWARE = "v5p:4x4x4"
TARGET_PER_SECOND = 2000


def _sharding(draw: random.Random, name: str, letters: str) -> ShardedArray:
    places: dict[str, list[str]] = {letter: [] for letter in letters}
    for axis in draw.sample(MESH.axes, len(MESH.axes)):
        places.get(draw.choice([*letters, ""]), []).append(axis)
    return ShardedArray(name, tuple(letters), tuple(tuple(places[letter]) for letter in letters))


def random_contraction(draw: random.Random, hardware: Hardware) -> Question:
    """A contraction of up to four letters an operand."""
    batch, contracted = "B"[: draw.choice((0, 0, 1))], "JM"[: draw.choice((1, 1, 1, 2))]
    left, right = "IN"[: draw.choice((1, 1, 1, 2))], "KL"[: draw.choice((1, 1, 1, 2))]
    lhs, rhs, out = batch + left + contracted, batch + contracted + right, batch + left + right
    sizes = {letter: 64 * draw.randrange(1, 65) for letter in lhs + right}
    wanted = None if draw.random() < 0.25 else _sharding(draw, "C", out)
    einsum = Einsum(lhs, rhs, out)
    arrays = _sharding(draw, "A", lhs), _sharding(draw, "B", rhs), wanted
    return Question(einsum, *arrays, MESH, sizes, hardware, "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contractions", type=int, default=5000)
    parser.add_argument("--listed", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    hardware = catalog.load(HARDWARE).ideal()
    rates, wall = [], []
    for number in range(options.rounds):
        draw = random.Random(number)
        cases = [random_contraction(draw, hardware) for _ in range(options.contractions)]
        gc.collect()
        gc.disable()  # as timeit does
        started, cpu = time.perf_counter(), time.process_time()
        for question in cases:
            cheapest(question)
        gc.enable()
        rates.append(options.contractions / (time.process_time() - cpu))
        wall.append(options.contractions / (time.perf_counter() - started))
    draw = random.Random(0)
    listed = [random_contraction(draw, hardware) for _ in range(options.listed)]
    cpu = time.process_time()
    found = sum(len(strategies(question)) for question in listed)
    cpu = time.process_time() - cpu
    assert not {"jax", "jaxlib"} & set(sys.modules)
    document = {
        "benchmark": "contractions",
        "command": f"python benchmarks/contractions.py --contractions {options.contractions}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "mesh": dict(MESH.sizes),
        "hardware": HARDWARE,
        "contractions": options.contractions,
        "target_per_second": TARGET_PER_SECOND,
        "first_round_per_cpu_second": rates[0],
        "median_per_cpu_second": statistics.median(rates),
        "median_per_wall_second": statistics.median(wall),
        "listed": {
            "contractions": len(listed),
            "contractions_per_cpu_second": len(listed) / cpu,
            "strategies_per_contraction": found / len(listed),
        },
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
