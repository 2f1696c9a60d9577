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


def _prefill(*heads: Any) -> Callable[[], Any]:
    """Keys of all layers, returned whole or as they were computed, split by heads."""

    def run() -> Any:
        m = mesh("tensor")

        def step(weights: Any, x: Any) -> Any:
            def layer(x: Any, w: Any) -> Any:
                keys = jnp.einsum("btd,dkh->btkh", x, w[0])
                return x + jnp.einsum("btkh,khd->btd", jnp.tanh(keys), w[1]), keys

            return lax.scan(layer, x, weights)[1]

        out = NamedSharding(m, P(None, None, None, *heads))
        weights = array(m, (4, 256, 8, 32), None, None, "tensor"), array(m, (4, 8, 32, 256), None, "tensor")
        return jax.jit(step, out_shardings=out), (weights, array(m, (8, 512, 256)))

    return run


def _groups(*, exchanged: bool) -> Callable[[], Any]:
    """Experts chosen by one-hot numbers, whose weights or whose rows are sent to the other devices."""

    def run() -> Any:
        m = mesh("data")

        def step(x: Any, first: Any, second: Any, chosen: Any) -> Any:
            sent = jax.nn.one_hot(chosen, 8 * 128).reshape(*chosen.shape, 8, 128)
            rows = jnp.einsum("gsec,gsd->egcd", sent, x)
            rows = constrained(m, constrained(m, rows, None, "data"), "data") if exchanged else rows
            rows = jnp.einsum(
                "egcf,efd->egcd", jax.nn.relu(jnp.einsum("egcd,edf->egcf", rows, first)), second
            )
            rows = constrained(m, constrained(m, rows, "data"), None, "data") if exchanged else rows
            return jnp.einsum("gsec,egcd->gsd", sent, rows)

        weights = array(m, (8, 512, 8192), "data"), array(m, (8, 8192, 512), "data")
        chosen = array(m, (64, 512), "data", dtype=jnp.int32)
        return jax.jit(step), (array(m, (64, 512, 512), "data"), *weights, chosen)

    return run


def _positions(*, split: bool) -> Callable[[], Any]:
    """The loss and its gradients by chunks of positions, of which each device has whole ones or parts."""

    def run() -> Any:
        m = mesh("sequence")

        def loss(head: Any, h: Any) -> Any:
            chunks = constrained(m, h, None, "sequence").reshape(4, 16, 64, 256).swapaxes(0, 1)
            if split:
                chunks = constrained(m, chunks, None, None, "sequence")
            losses = lambda _, h: (None, jax.nn.logsumexp(h @ head, -1))  # noqa: E731
            return lax.scan(losses, None, chunks)[1].sum()

        args = array(m, (256, 4096)), array(m, (4, 1024, 256), None, "sequence")
        return jax.jit(loss), args

    return run


def _accumulated_layers() -> Any:
    """FSDP that gathers a layer's weights for each microbatch, and adds up sharded gradients."""
    m = mesh("fsdp")

    def loss(w: Any, x: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, w: Any) -> Any:
            return constrained(m, jnp.tanh(x @ constrained(m, w)), "fsdp"), None

        return jnp.mean(lax.scan(layer, x, w)[0] ** 2)

    def step(w: Any, turns: Any) -> Any:
        def turn(total: Any, x: Any) -> Any:
            return constrained(m, total + jax.grad(loss)(w, x), None, "fsdp"), None

        return w - 0.1 * lax.scan(turn, jnp.zeros_like(w), turns)[0]

    args = array(m, (4, 256, 256), None, "fsdp"), array(m, (2, 4096, 256), None, "fsdp")
    return jax.jit(step, donate_argnums=0), args


def _means(*spec: Any) -> Callable[[], Any]:
    """The running means of weights, whole on each device or split as the weights: one finding, of state."""

    def run() -> Any:
        m = mesh("data")

        def step(w: Any, means: Any, x: Any) -> Any:
            g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ constrained(m, w)) ** 2))(w)
            w = constrained(m, w - 0.1 * g, "data")
            return w, constrained(m, 0.9 * means + 0.1 * w, "data")

        weight = array(m, (16384, 65536), "data")
        means = array(m, weight.shape, *spec)
        return jax.jit(step, donate_argnums=0), (weight, means, array(m, (1024, 16384), "data"))

    return run


def _average(*spec: Any) -> Callable[[], Any]:
    """The mean of checkpoints, returned whole or in the checkpoints' shards."""

    def run() -> Any:
        m = mesh("fsdp")
        checkpoint = {"w": array(m, (512, 1024), None, "fsdp")}
        mean = jax.jit(
            lambda both: jax.tree.map(lambda *each: sum(each) / 2, *both),
            out_shardings=NamedSharding(m, P(None, *spec)),
        )
        return mean, ((checkpoint, checkpoint),)

    return run


def _quantised(*, early: bool) -> Callable[[], Any]:
    """Weights of 8 bits with scales for each column, sent before or after they are multiplied by these."""

    def run() -> Any:
        m = mesh("fsdp")

        def forward(w: Any, scales: Any, x: Any) -> Any:
            if early:
                whole = constrained(m, constrained(m, w.astype(x.dtype) * scales, "fsdp"))
            else:
                whole = constrained(m, w).astype(x.dtype) * scales
            return jnp.tanh(x @ whole)

        args = array(m, (1024, 512), "fsdp", dtype=jnp.int8), array(m, (1, 512), dtype=jnp.bfloat16)
        return jax.jit(forward), (*args, array(m, (4096, 1024), "fsdp", dtype=jnp.bfloat16))

    return run


GIVEN = {
    "running means, whole": Case("replicated_optimizer_state", _means(), _means("data")),
    "an average of checkpoints returned whole": Case("returned_whole", _average(), _average("fsdp")),
    "weights scaled before they are sent": Case("widened", _quantised(early=True), _quantised(early=False)),
    "keys of all layers returned whole": Case("returned_whole", _prefill(), _prefill("tensor")),
    "experts whose weights are sent": Case(
        "weight_gathered_for_few_tokens", _groups(exchanged=False), _groups(exchanged=True)
    ),
    "chunks of split positions": Case("batch_gathered", _positions(split=False), _positions(split=True)),
    "microbatches of FSDP": Case(None, _accumulated_layers),
    "microbatches of which each device has whole ones": Case(
        "batch_gathered", _turns(by_rows=False), _turns(by_rows=True)
    ),
    "a bias of each sequence, whole": Case("given_whole", _bias(), _bias("data", "tensor")),
    "rows promoted by their gates": Case("promoted", _gated(narrow=False), _gated(narrow=True)),
    "residuals of layers in a row": Case(None, _layers),
    "sequence parallelism": Case(None, _sequences),
    "a cache that is not donated": Case("cache_copied", _position(donated=False), _position(donated=True)),
}
