"""How long the search for the cheapest reshard takes: prints JSON.

    python benchmarks/reshard_search.py [--pairs 100] > benchmarks/results/reshard_search.json

Random pairs of shardings of one array on machines with two to five mesh axes. cold: the graph of shardings is
drawn anew, as the one search of a command does; warm: it is there. CPU seconds of one core. Target: 50 ms
for what people type, two or three axes.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time

from meshwright.cost.reshard_seconds import step_price
from meshwright.hardware import catalog
from meshwright.notation import resharding
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective, reshard
from meshwright.notation.mesh import Mesh
from meshwright.notation.resharding import Price, cheapest_reshard

MACHINES = {
    "v5e:4x4": {"X": 4, "Y": 4},
    "v5p:4x4x4": {"X": 4, "Y": 4, "Z": 4},
    "h100:8x8": {"X": 2, "Y": 4, "Z": 2, "W": 4},
    "h100:16x8": {"X": 2, "Y": 2, "Z": 4, "W": 2, "V": 4},
}
RANKS = (2, 4)
TARGET_SECONDS = 0.05


def _sharding(draw: random.Random, mesh: Mesh, dims: str, *, partial: bool) -> ShardedArray:
    """Each axis on some dimension, nowhere, or a partial sum, in a random order."""
    axes = draw.sample(mesh.axes, len(mesh.axes))
    places = {axis: draw.randrange(len(dims) + 1 + partial) for axis in axes}
    split = tuple(tuple(axis for axis in axes if places[axis] == dim) for dim in range(len(dims)))
    summed = tuple(axis for axis in axes if places[axis] > len(dims))
    return ShardedArray("A", tuple(dims), split, summed)


def _seconds(steps: list[Collective], mesh: Mesh, sizes: dict[str, int], price: Price) -> float:
    return sum(price(s.op, s.axes, s.gathered_bytes(mesh, sizes, "bf16")) for s in steps)


def _result(spec: str, rank: int, num_pairs: int, draw: random.Random) -> dict:
    mesh, dims = Mesh(MACHINES[spec]), "IJKL"[:rank]
    sizes, price = dict.fromkeys(dims, 4096), step_price(catalog.load(spec).place(mesh))
    pairs = [
        (_sharding(draw, mesh, dims, partial=True), _sharding(draw, mesh, dims, partial=False))
        for _ in range(num_pairs)
    ]
    took: dict[str, list[float]] = {"cold": [], "warm": []}
    gains = []
    for pair in pairs:
        resharding._graph.cache_clear()
        resharding._arrangements.cache_clear()
        for case in took.values():
            started = time.process_time()
            found = cheapest_reshard(*pair, mesh, sizes, price)
            case.append(time.process_time() - started)
        if least := _seconds(found, mesh, sizes, price):
            gains.append(_seconds(reshard(*pair), mesh, sizes, price) / least)
    return {
        "hardware": spec,
        "mesh": dict(mesh.sizes),
        "rank": rank,
        "pairs": num_pairs,
        "searched_whole": sum(resharding.is_searchable(mesh, rank, pair[0].unreduced) for pair in pairs),
        **{f"{name}_median_seconds": statistics.median(case) for name, case in took.items()},
        **{f"{name}_max_seconds": max(case) for name, case in took.items()},
        "median_gain_over_rules": statistics.median(gains),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    num_pairs = parser.parse_args().pairs
    draw = random.Random(0)
    document = {
        "benchmark": "reshard_search",
        "command": f"python benchmarks/reshard_search.py --pairs {num_pairs}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "target_seconds": TARGET_SECONDS,
        "results": [_result(spec, rank, num_pairs, draw) for spec in MACHINES for rank in RANKS],
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
