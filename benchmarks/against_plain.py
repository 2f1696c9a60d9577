"""A step of a layout beside the same model's plain JAX step with that sharding: prints JSON.

    python benchmarks/against_plain.py [--rounds 8] [--layouts data=8 fsdp=8 ...] \\
        > benchmarks/results/against_plain.json

The plain step (plain.py) has its weights and rows split as the layout stores them, and XLA chooses all else.
Both run on 8 virtual devices of the host in one process, in turns, in float32; a ratio is the median over the
rounds. Target: at most 1.03 times the plain step.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from training import machine, use_cpu_devices

NUM_DEVICES = 8
use_cpu_devices(NUM_DEVICES)

import jax  # noqa: E402 - the devices are fixed when JAX starts
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402
from plain import RATE, PlainStep, plain_weights  # noqa: E402

from meshwright.layout import Layout  # noqa: E402
from meshwright.layout.moves.attention import token_sharding  # noqa: E402
from meshwright.layout.workload import Workload  # noqa: E402
from meshwright.models.config import ModelConfig  # noqa: E402
from meshwright.nn.start.device_mesh import partition_spec  # noqa: E402
from meshwright.train.optimizers import OptimizerConfig  # noqa: E402
from meshwright.train.step import CompiledStep  # noqa: E402

MODEL = ModelConfig("llama-3m", 2, 256, 768, 8, 8, 32, 2048, 128)
WORKLOAD = Workload(8, seq_len=128)
LAYOUTS = ["data=8", "fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"]
TARGET = 1.03
LETTERS = {
    "wq": "DNH", "wk": "DKH", "wv": "DKH", "wo": "NHD", "w_gate": "DF", "w_in": "DF", "w_out": "FD",
    "embed": "VD", "unembed": "DV",
}  # fmt: skip

Step = Callable[[np.ndarray], float]


def ours(layout: Layout) -> Step:
    """The step that `mw train` runs."""
    optimizer = OptimizerConfig(RATE, 1, 1000, schedule="constant")
    step = CompiledStep(MODEL, layout, WORKLOAD, optimizer, chip_flops_per_second=1e11)
    state = step.init(0)

    def run(rows: np.ndarray) -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(step.step(state, rows))
        return float(metrics["loss"])

    return run


def plain(layout: Layout) -> Step:
    sizes = layout.mesh.sizes
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

    def placed(path: Any, weight: jax.Array) -> jax.Array:
        name = path[-1].key
        # Norms are whole: XLA would gather 256 numbers.
        spec = partition_spec(layout.weight(name, LETTERS[name])) if name in LETTERS else PartitionSpec()
        return jax.device_put(weight, NamedSharding(mesh, _over_layers(spec, weight)))

    weights = jax.tree_util.tree_map_with_path(placed, plain_weights(MODEL))
    rows_split = partition_spec(token_sharding(layout, "tokens").replace(axes={"T": ()}))
    step = PlainStep(MODEL, jnp.float32, weights)
    return lambda rows: step(jax.device_put(rows, NamedSharding(mesh, PartitionSpec(*rows_split.partitions))))


def _over_layers(spec: PartitionSpec, weight: jax.Array) -> PartitionSpec:
    """The spec of a layer's weight for all layers in one array."""
    entries = tuple(spec.partitions)
    return PartitionSpec(*(None,) * (weight.ndim - len(entries)), *entries) if entries else PartitionSpec()


def measured(text: str, rounds: int) -> dict[str, Any]:
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    shape = WORKLOAD.num_sequences, WORKLOAD.seq_len + 1
    rows = np.random.default_rng(1).integers(0, MODEL.vocab_size, shape, np.int32)
    steps = {"ours": ours(layout), "plain": plain(layout)}
    losses = {who: [step(rows), step(rows)] for who, step in steps.items()}  # the first compiles
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    cpu_seconds: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(rounds):
        for who, step in steps.items():
            began, used = time.perf_counter(), time.process_time()
            losses[who].append(step(rows))
            seconds[who].append(time.perf_counter() - began)
            cpu_seconds[who].append(time.process_time() - used)
    return {
        "layout": text,
        "seconds": {who: statistics.median(each) for who, each in seconds.items()},
        "ratio": _ratio(seconds),
        "ratio_of_cpu_seconds": _ratio(cpu_seconds),
        "losses": losses,
        "target": TARGET,
    }


def _ratio(seconds: dict[str, list[float]]) -> float:
    return statistics.median(
        mine / other for mine, other in zip(seconds["ours"], seconds["plain"], strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    options = parser.parse_args()
    document = {
        "benchmark": "against_plain",
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        "model": MODEL.name,
        "layouts": [measured(text, options.rounds) for text in options.layouts],
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
