"""How many contractions a second have their strategies priced: prints JSON.

    python benchmarks/contractions.py > benchmarks/results/contractions.json

matmul: A[I, J] . B[J, K]. einsum: up to four letters an operand, with a batch letter, two contracted or two
free letters a side. Each mesh axis splits any dimension of each array or none, in any order, and one
output in four is left open. `cheapest` asks for the best alone, `listed` for all that `mw shard` shows. The
first contraction of a process draws the graph of shardings: `first_seconds`. One core; no JAX.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable

from meshwright.cost.strategies import cheapest, strategies
from meshwright.cost.strategy import ContractionQuestion
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import Einsum
from meshwright.notation.mesh import Mesh

MACHINES = {"v5e:4x4": {"X": 4, "Y": 4}, "v5p:4x4x4": {"X": 4, "Y": 4, "Z": 4}}
TARGET_PER_SECOND = 300  # of matmuls, all their strategies listed


def _sharding(draw: random.Random, name: str, letters: str, mesh: Mesh) -> ShardedArray:
    places: dict[str, list[str]] = {letter: [] for letter in letters}
    for axis in draw.sample(mesh.axes, len(mesh.axes)):
        places.get(draw.choice([*letters, ""]), []).append(axis)
    return ShardedArray(name, tuple(letters), tuple(tuple(places[letter]) for letter in letters))


def random_contraction(
    draw: random.Random, hardware: Hardware, mesh: Mesh, *, is_matmul: bool
) -> ContractionQuestion:
    batch, contracted, left, right = "", "J", "I", "K"
    if not is_matmul:
        batch, contracted = "B"[: draw.choice((0, 0, 1))], "JM"[: draw.choice((1, 1, 1, 2))]
        left, right = "IN"[: draw.choice((1, 1, 1, 2))], "KL"[: draw.choice((1, 1, 1, 2))]
    einsum = Einsum(batch + left + contracted, batch + contracted + right, batch + left + right)
    sizes = {letter: 64 * draw.randrange(1, 65) for letter in einsum.letters}
    wanted = None if draw.random() < 0.25 else _sharding(draw, "C", einsum.out, mesh)
    arrays = _sharding(draw, "A", einsum.lhs, mesh), _sharding(draw, "B", einsum.rhs, mesh), wanted
    return ContractionQuestion(einsum, *arrays, mesh, sizes, hardware, "bf16")


def _per_cpu_second(
    answer: Callable[[ContractionQuestion], object], cases: list[ContractionQuestion]
) -> float:
    started = time.process_time()
    for question in cases:
        answer(question)
    return len(cases) / (time.process_time() - started)


def _result(spec: str, *, is_matmul: bool, count: int) -> dict:
    hardware, mesh, draw = catalog.load(spec).ideal(), Mesh(MACHINES[spec]), random.Random(0)
    cases = [random_contraction(draw, hardware, mesh, is_matmul=is_matmul) for _ in range(count)]
    first = 1 / _per_cpu_second(strategies, cases[:1])
    return {
        "contraction": "matmul" if is_matmul else "einsum",
        "hardware": spec,
        "mesh": dict(mesh.sizes),
        "contractions": count,
        "first_seconds": first,
        "listed_per_cpu_second": _per_cpu_second(strategies, cases),
        "cheapest_per_cpu_second": _per_cpu_second(cheapest, cases),
        "strategies_per_contraction": sum(len(strategies(question)) for question in cases) / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contractions", type=int, default=300)
    count = parser.parse_args().contractions
    results = [
        _result(spec, is_matmul=is_matmul, count=count) for is_matmul in (True, False) for spec in MACHINES
    ]
    assert not {"jax", "jaxlib"} & set(sys.modules)
    document = {
        "benchmark": "contractions",
        "command": f"python benchmarks/contractions.py --contractions {count}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
        "target_per_second": TARGET_PER_SECOND,
        "results": results,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
