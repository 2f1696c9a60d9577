"""Programs whose collectives come from one operation of the user's, each with the remedy.

Cases are as in foreign_cases.py. Users reported these as issues of jax-ml/jax: 14559 (random bits), 16476 and
20683 (loops and maps over split rows).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.audit.foreign_cases import Case, array, constrained, mesh


def _dropout(*, partitionable: bool) -> Callable[[], Any]:
    def run() -> Any:
        m = mesh("data")

        def loss(w: Any, x: Any, key: Any) -> Any:
            h = jnp.tanh(x @ w)
            return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0) ** 2)

        def step(w: Any, x: Any, key: Any) -> Any:
            with jax.threefry_partitionable(partitionable):
                return w - 0.1 * jax.grad(loss)(w, x, key)

        args = array(m, (64, 128)), array(m, (256, 64), "data"), array(m, (2,), dtype=jnp.uint32)
        return jax.jit(step, donate_argnums=0), args

    return run


def _heads(count: int) -> Callable[[], Any]:
    """Attention whose heads are constrained to be split over eight devices."""

    def run() -> Any:
        m = mesh("tensor")

        def forward(w: Any, x: Any) -> Any:
            q, k = (constrained(m, jnp.einsum("btd,dnh->btnh", x, a), None, None, "tensor") for a in w)
            return jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))

        split = (None, "tensor") if count % 8 == 0 else ("tensor",)
        weight = array(m, (64, count, 16), *split)
        return jax.jit(forward), ((weight, weight), array(m, (2, 64, 64)))

    return run


def _examples(*, by_hand: bool) -> Callable[[], Any]:
    """Clipped gradients of single examples, added up by a loop over all examples, or over a device's own."""

    def run() -> Any:
        m = mesh("data")

        def gradient(w: Any, x: Any) -> Any:
            g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
            return g / jnp.maximum(jnp.sqrt(jnp.sum(g**2)), 1)

        def total(w: Any, x: Any) -> Any:
            return lax.scan(lambda g, row: (g + gradient(w, row), None), jnp.zeros_like(w), x)[0]

        def local(w: Any, x: Any) -> Any:
            return lax.psum(total(w, x), "data")

        mapped = jax.shard_map(local, mesh=m, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
        step = jax.jit(lambda w, x: w - 0.1 * (mapped if by_hand else total)(w, x), donate_argnums=0)
        return step, (array(m, (64, 64)), array(m, (32, 16, 64), "data"))

    return run


def _scores(*, mapped: bool) -> Callable[[], Any]:
    """Scores of examples, one at a time or all together."""

    def run() -> Any:
        m = mesh("data")

        def forward(w: Any, x: Any) -> Any:
            def score(row: Any) -> Any:
                return jnp.mean(jnp.tanh(row @ w) ** 2)

            return lax.map(score, x) if mapped else jax.vmap(score)(x)

        return jax.jit(forward), (array(m, (64, 64)), array(m, (32, 16, 64), "data"))

    return run


def _samples(*, tiled: bool) -> Callable[[], Any]:
    """Several samples of each prompt."""

    def run() -> Any:
        m = mesh("data")

        def forward(w: Any, x: Any) -> Any:
            x = jnp.tile(x, (4, 1, 1)) if tiled else jnp.repeat(x, 4, axis=0)
            return constrained(m, jnp.tanh(constrained(m, x, "data") @ w), "data")

        return jax.jit(forward), (array(m, (64, 64)), array(m, (16, 32, 64), "data"))

    return run


def _ensemble(*, by_hand: bool) -> Callable[[], Any]:
    """Convolutions of split members, each with its own images."""

    def run() -> Any:
        m = mesh("member")

        def convolve(kernel: Any, x: Any) -> Any:
            form = ("NHWC", "HWIO", "NHWC")
            return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=form)

        def forward(kernels: Any, x: Any) -> Any:
            return jax.vmap(convolve)(kernels, x)

        args = array(m, (8, 3, 3, 16, 16), "member"), array(m, (8, 4, 16, 16, 16), "member")
        if by_hand:
            split = P("member")
            return jax.jit(
                jax.shard_map(forward, mesh=m, in_specs=(split, split), out_specs=split, check_vma=False)
            ), args
        return jax.jit(forward, out_shardings=NamedSharding(m, P("member"))), args

    return run


def _heads_for_positions(*, exchanged: bool) -> Callable[[], Any]:
    """Positions gathered, of which each device takes its heads, or one exchange."""

    def run() -> Any:
        m = mesh("x")

        def local(x: Any) -> Any:
            if exchanged:
                return jnp.cumsum(lax.all_to_all(x, "x", 2, 1, tiled=True), 1)
            x = lax.all_gather(x, "x", axis=1, tiled=True)
            return jnp.cumsum(lax.dynamic_slice_in_dim(x, lax.axis_index("x") * 2, 2, 2), 1)

        run = jax.shard_map(
            local, mesh=m, in_specs=P(None, "x"), out_specs=P(None, None, "x"), check_vma=False
        )
        return jax.jit(run), (array(m, (2, 128, 16, 8), None, "x"),)

    return run


def _stages(*, in_turn: bool) -> Callable[[], Any]:
    """A pipeline of one batch, or of sixteen microbatches."""

    def run() -> Any:
        m, count = mesh("pipe"), 16
        ring = [(i, (i + 1) % 8) for i in range(8)]

        def whole(w: Any, x: Any) -> Any:
            device = lax.axis_index("pipe")

            def turn(h: Any, i: Any) -> Any:
                return lax.ppermute(jnp.where(device == i, jnp.tanh(h @ w[0]), h), "pipe", ring), None

            h, _ = lax.scan(turn, x, jnp.arange(8))
            return lax.psum(jnp.where(device == 0, h, 0), "pipe")

        def parts(w: Any, x: Any) -> Any:
            device, rows = lax.axis_index("pipe"), x.reshape(count, -1, x.shape[-1])

            def turn(carry: Any, i: Any) -> Any:
                h, out = carry
                y = jnp.tanh(jnp.where(device == 0, rows[jnp.minimum(i, count - 1)], h) @ w[0])
                done = out.at[jnp.maximum(i - 7, 0)].set(y)
                out = jnp.where((device == 7) & (i >= 7), done, out)
                return (lax.ppermute(y, "pipe", ring), out), None

            start = jnp.zeros_like(rows[0]), jnp.zeros_like(rows)
            (_, out), _ = lax.scan(turn, start, jnp.arange(count + 7))
            return lax.psum(jnp.where(device == 7, out, 0), "pipe").reshape(x.shape)

        specs = P("pipe"), P()
        local = whole if in_turn else parts
        run = jax.shard_map(local, mesh=m, in_specs=specs, out_specs=P(), check_vma=False)
        return jax.jit(run), (array(m, (8, 64, 64), "pipe"), array(m, (256, 64)))

    return run


def _layers_of_sums() -> Any:
    """Layers split by columns and rows, each with a residual that the next layer reads."""
    m = mesh("tensor")

    def layer(x: Any, w: Any) -> Any:
        return constrained(m, x + jnp.tanh(x @ w[0]) @ w[1], None, None), None

    weights = array(m, (4, 64, 128), None, None, "tensor"), array(m, (4, 128, 64), None, "tensor")
    return jax.jit(lambda w, x: lax.scan(layer, x, w)[0]), (weights, array(m, (32, 64)))


def _taught() -> Any:
    """A student that learns from frozen layers, all of them sharded and gathered in their layer."""
    m = mesh("fsdp")

    def net(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return constrained(m, x + jnp.tanh(x @ constrained(m, w, None, None)), "fsdp"), None

        return lax.scan(jax.checkpoint(layer), x, weights)[0]

    def loss(student: Any, teacher: Any, x: Any) -> Any:
        return jnp.mean((net(student, x) - net(teacher, x)) ** 2)

    step = jax.jit(lambda s, t, x: s - 0.1 * jax.grad(loss)(s, t, x), donate_argnums=0)
    args = (
        array(m, (2, 64, 64), None, "fsdp"),
        array(m, (4, 64, 64), None, "fsdp"),
        array(m, (512, 64), "fsdp"),
    )
    return step, args


ORIGINS = {
    "random bits of the older threefry": Case(
        "random_numbers_moved", _dropout(partitionable=False), _dropout(partitionable=True)
    ),
    "twelve heads over eight devices": Case("weight_resharded", _heads(12), _heads(16)),
    "a loop over split examples": Case("batch_gathered", _examples(by_hand=False), _examples(by_hand=True)),
    "scores of split examples by lax.map": Case(
        "batch_gathered", _scores(mapped=True), _scores(mapped=False)
    ),
    "prompts that are tiled": Case("batch_gathered", _samples(tiled=True), _samples(tiled=False)),
    "convolutions of an ensemble": Case(
        "contraction_gathered", _ensemble(by_hand=False), _ensemble(by_hand=True)
    ),
    "heads cut out of gathered positions": Case(
        "gathered_for_a_part", _heads_for_positions(exchanged=False), _heads_for_positions(exchanged=True)
    ),
    "stages that work in turn": Case("computed_repeatedly", _stages(in_turn=True), _stages(in_turn=False)),
    "residuals of layers in a loop": Case(None, _layers_of_sums),
    "a frozen teacher in shards": Case(None, _taught),
}
