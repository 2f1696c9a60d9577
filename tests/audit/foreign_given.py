"""Programs with one mistake each in how arrays are given to a step, each with the remedy.

Cases are as in foreign_cases.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.audit.foreign_cases import Case, array, constrained, mesh


def grid(rows: str, columns: str) -> Mesh:
    """Eight devices, two by four."""
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), (rows, columns))


def _turns(*, by_rows: bool) -> Callable[[], Any]:
    """Tokens of a batch cut into microbatches: whole turns, or a part of each turn, on each device."""

    def run() -> Any:
        m = mesh("data")

        def step(table: Any, w: Any, tokens: Any) -> Any:
            def turn(_: Any, rows: Any) -> Any:
                return None, jnp.sum(jnp.tanh(table[rows] @ w) ** 2, -1)

            turns = tokens.reshape(16, 8, 32).swapaxes(0, 1) if by_rows else tokens.reshape(8, 16, 32)
            return lax.scan(turn, None, turns)[1]

        args = array(m, (512, 256)), array(m, (256, 256)), array(m, (128, 32), "data", dtype=jnp.int32)
        return jax.jit(step), args

    return run


def _bias(*spec: Any) -> Callable[[], Any]:
    """Attention with a bias of each sequence and head."""

    def run() -> Any:
        m = grid("data", "tensor")

        def step(x: Any, w: Any, bias: Any) -> Any:
            heads = jnp.einsum("btd,dnh->bnth", x, w)
            scores = jax.nn.softmax(jnp.einsum("bnth,bnsh->bnts", heads, heads) + bias)
            return jnp.einsum("bnts,bnsh->bnth", scores, heads)

        args = array(m, (64, 1024, 64), "data"), array(m, (64, 32, 16), None, "tensor")
        return jax.jit(step), (*args, array(m, (64, 32, 1024, 1024), *spec))

    return run


def _gated(*, narrow: bool) -> Callable[[], Any]:
    """Rows scaled by 32-bit gates before they are exchanged, and multiplied by 16-bit weights."""

    def run() -> Any:
        m = mesh("expert")

        def local(x: Any, router: Any, w: Any) -> Any:
            gate = jax.nn.softmax(x.astype(jnp.float32) @ router)
            rows = x * gate.max(-1, keepdims=True).astype(x.dtype if narrow else jnp.float32)
            rows = jnp.zeros((64 * 8, 256), rows.dtype).at[jnp.argsort(gate.max(-1))].set(rows)
            rows = lax.all_to_all(rows, "expert", 0, 0, tiled=True)
            return jax.nn.relu(rows @ w[0])

        split = P("expert")
        mapped = jax.shard_map(local, mesh=m, in_specs=(split, P(), split), out_specs=split)
        rows, w = array(m, (4096, 256), "expert"), array(m, (8, 256, 256), "expert", dtype=jnp.bfloat16)
        return jax.jit(mapped), (
            jax.ShapeDtypeStruct(rows.shape, jnp.bfloat16, sharding=rows.sharding),
            array(m, (256, 8)),
            w,
        )

    return run


def _layers() -> Any:
    """Layers of tensor parallelism in a row, each of which reads the sums of those before."""
    m = mesh("tensor")

    def step(table: Any, weights: Any, tokens: Any) -> Any:
        x = table[tokens]
        for first, second in weights:
            x = x + jax.nn.relu(x / (1 + jnp.abs(x).mean(-1, keepdims=True)) @ first) @ second
        return x

    layer = array(m, (256, 1024), None, "tensor"), array(m, (1024, 256), "tensor")
    args = array(m, (4096, 256), "tensor"), (layer, layer, layer), array(m, (512,), dtype=jnp.int32)
    return jax.jit(step), args


def _sequences() -> Any:
    """Sequence parallelism: positions between the layers are split over the axis of the weights."""
    m = grid("data", "tensor")

    def loss(weights: Any, x: Any) -> Any:
        for first, second in weights:
            h = constrained(m, jnp.tanh(x), "data", None, None)
            h = constrained(m, jax.nn.relu(h @ first), "data", None, "tensor")
            x = x + constrained(m, h @ second, "data", "tensor", None)
        return jnp.mean(x**2)

    layer = array(m, (256, 1024), None, "tensor"), array(m, (1024, 256), "tensor")
    args = (layer, layer), array(m, (8, 256, 256), "data", "tensor")
    return jax.jit(jax.grad(loss)), args


def _position(*, donated: bool) -> Callable[[], Any]:
    """A position written into a cache, which a step returns in new memory or in place."""

    def run() -> Any:
        m = mesh("data")

        def step(cache: Any, row: Any, at: Any) -> Any:
            cache = lax.dynamic_update_slice(cache, row[:, None], (0, at, 0))
            return cache, jnp.einsum("bsh,bh->bs", cache, row)

        args = array(m, (64, 512, 128), "data"), array(m, (64, 128), "data")
        at = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(m, P()))
        return jax.jit(step, donate_argnums=(0,) if donated else ()), (*args, at)

    return run


GIVEN = {
    "microbatches of which each device has whole ones": Case(
        "batch_gathered", _turns(by_rows=False), _turns(by_rows=True)
    ),
    "a bias of each sequence, whole": Case("given_whole", _bias(), _bias("data", "tensor")),
    "rows promoted by their gates": Case("promoted", _gated(narrow=False), _gated(narrow=True)),
    "residuals of layers in a row": Case(None, _layers),
    "sequence parallelism": Case(None, _sequences),
    "a cache that is not donated": Case("cache_copied", _position(donated=False), _position(donated=True)),
}
