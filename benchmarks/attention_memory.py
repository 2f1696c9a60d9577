"""What attention by blocks and round a ring holds beside the naive form, on CPU devices. Prints JSON.

    python benchmarks/attention_memory.py > benchmarks/results/attention_memory.json

    ring    the memory of a device in attention, forward and backward, over 8 devices that pass keys and
            values round, beside one device with all positions: queries, keys, values and their gradients,
            and what the compiler takes besides ("temporary"), as compiled
    flash   what the compiler takes on one device by blocks beside the naive form, which has all scores at
            once; and their times in turns

Targets: a ring about 1/8 of the memory, blocks at most 1/8 of it and not slower.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from training import machine, use_cpu_devices

use_cpu_devices(8)

import jax  # noqa: E402 - the devices are fixed when JAX starts
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from meshwright.layout import Layout  # noqa: E402
from meshwright.layout.moves.attention import token_sharding  # noqa: E402
from meshwright.models.at_layer import Places  # noqa: E402
from meshwright.nn.attention.blockwise import blockwise  # noqa: E402
from meshwright.nn.attention.by_formula import ScoreForm, attend, visible  # noqa: E402
from meshwright.nn.start.device_mesh import device_mesh, named_sharding  # noqa: E402

HEADS, D_HEAD, POSITIONS, MANY_POSITIONS = 2, 64, 8192, 65536
NAIVE, BLOCKS = "naive", "by blocks"


def in_turns(one: Callable[[], object], other: Callable[[], object], rounds: int) -> dict[str, Any]:
    """The ratio of the times of two programs, after each has run once."""
    one()
    other()
    ratios = []
    for _ in range(rounds):
        began = time.perf_counter()
        one()
        between = time.perf_counter()
        other()
        ratios.append((between - began) / (time.perf_counter() - between))
    return {"time_ratio": statistics.median(ratios), "rounds": sorted(ratios)}


def attention(layout: Layout, form: str, num_positions: int) -> tuple[Callable[[], object], int, int]:
    """A forward and backward pass of causal attention; its bytes on a device, and those of temporaries."""
    mesh = device_mesh(layout)
    random = np.random.default_rng(0)
    where = named_sharding(layout.activation("q", "BTNH"), mesh)
    shape = (1, num_positions, HEADS, D_HEAD)
    q, k, v = (jax.device_put(random.standard_normal(shape, np.float32), where) for _ in range(3))
    positions = jnp.arange(num_positions, dtype=jnp.int32)[None]
    whole = jax.device_put(positions, NamedSharding(mesh, PartitionSpec()))
    own = jax.device_put(positions, named_sharding(token_sharding(layout, "tokens"), mesh))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        queries, keys = Places(own), Places(whole)
        if form == BLOCKS:
            out = blockwise(q, k, v, None, queries, keys, None, layout, ScoreForm(D_HEAD**-0.5))
        else:
            out = attend(q, k, v, None, visible(queries, keys, None), layout, ScoreForm(D_HEAD**-0.5))
        return jnp.sum(out * out)

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v).compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA for CPU tells a program's memory"
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporary = memory.temp_size_in_bytes
    return lambda: jax.block_until_ready(compiled(q, k, v)), given + temporary, temporary


def in_ring(one: Layout, eight: Layout, num_positions: int) -> dict[str, Any]:
    """The memory of a device of eight beside that of one."""
    _, of_1, temporary_of_1 = attention(one, BLOCKS, num_positions)
    _, of_8, temporary_of_8 = attention(eight, BLOCKS, num_positions)
    return {
        "positions": num_positions,
        "bytes_of_8": of_8,
        "bytes_of_1": of_1,
        "memory_ratio": of_8 / of_1,
        "temporary_bytes_of_8": temporary_of_8,
        "temporary_bytes_of_1": temporary_of_1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    float32 = {"weights_dtype": "f32", "compute_dtype": "f32"}
    one, eight = (Layout.of(context=n, context_method="ring", **float32) for n in (1, 8))
    blocks, _, held = attention(one, BLOCKS, POSITIONS)
    naive, _, naive_held = attention(one, NAIVE, POSITIONS)
    flash = in_turns(blocks, naive, rounds)
    print(
        json.dumps(
            {
                "machine": machine(),
                "command": "python benchmarks/attention_memory.py",
                "ring": [in_ring(one, eight, positions) for positions in (POSITIONS, MANY_POSITIONS)],
                "flash": {"bytes": held, "naive_bytes": naive_held, "memory_ratio": held / naive_held}
                | flash,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
