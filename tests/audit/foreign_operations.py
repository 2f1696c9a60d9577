"""Programs with one mistake each in how an operation is written, each with the remedy.

Cases are as in foreign_cases.py. They are short forms of scripts in the styles of Flax, Optax and Equinox, of
hand-written collectives, and of recommendation and graph models.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from tests.audit.foreign_cases import Case, array, constrained, mesh


def _vocabulary_loss(*, gathered: bool) -> Callable[[], Any]:
    """The gradient of a cross-entropy of logits split by vocabulary, in a shard_map."""

    def run() -> Any:
        m = mesh("tensor")

        def local(w: Any, h: Any, labels: Any) -> Any:
            logits = h @ w
            if gathered:
                logits = lax.all_gather(logits, "tensor", axis=1, tiled=True)
                logp = jax.nn.log_softmax(logits)
                return lax.pmean(-jnp.take_along_axis(logp, labels[:, None], 1).mean(), "tensor")
            most = lax.pmax(lax.stop_gradient(logits).max(-1), "tensor")
            total = lax.psum(jnp.exp(logits - most[:, None]).sum(-1), "tensor")
            at = labels - lax.axis_index("tensor") * w.shape[1]
            own = jnp.take_along_axis(logits, jnp.clip(at, 0, w.shape[1] - 1)[:, None], 1)[:, 0]
            target = lax.psum(jnp.where((at >= 0) & (at < w.shape[1]), own, 0), "tensor")
            return (jnp.log(total) + most - target).mean()

        loss = jax.shard_map(local, mesh=m, in_specs=(P(None, "tensor"), P(), P()), out_specs=P())
        args = array(m, (64, 4096), None, "tensor"), array(m, (256, 64)), array(m, (256,), dtype=jnp.int32)
        return jax.jit(jax.grad(loss, argnums=(0, 1))), args

    return run


def _nucleus(*, exchanged: bool) -> Callable[[], Any]:
    """Sampling from the likeliest tokens of a vocabulary that is split over devices."""

    def run() -> Any:
        m = mesh("tensor")

        def sample(h: Any, w: Any, key: Any) -> Any:
            logits = constrained(m, h @ w, None, "tensor")
            logits = constrained(m, logits, "tensor") if exchanged else logits
            order = jnp.argsort(-logits, -1)
            probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, -1))
            kept = jnp.cumsum(probabilities, -1) - probabilities < 0.9
            chosen = jax.random.categorical(key, jnp.where(kept, jnp.log(probabilities), -jnp.inf))
            return jnp.take_along_axis(order, chosen[:, None], 1)[:, 0]

        args = array(m, (64, 64)), array(m, (64, 8192), None, "tensor"), array(m, (2,), dtype=jnp.uint32)
        return jax.jit(sample), args

    return run


def _output_weight(dim: int, *, whole: bool) -> Callable[[], Any]:
    """Attention's heads are split, and the weight that joins them is whole."""

    def run() -> Any:
        m = mesh("tensor")

        def forward(x: Any, w_v: Any, w_o: Any) -> Any:
            return jnp.einsum("bnh,nhd->bd", jax.nn.relu(jnp.einsum("bd,dnh->bnh", x, w_v)), w_o)

        split = () if whole else ("tensor",)
        w_v, w_o = array(m, (dim, 8, dim // 8), None, "tensor"), array(m, (8, dim // 8, dim), *split)
        return jax.jit(forward), (array(m, (64, dim)), w_v, w_o)

    return run


def _small_state() -> Any:
    """A convolution with momentum, whose weights and moments are a small part of its memory."""
    m = mesh("data")

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(lax.conv(x, w, (1, 1), "SAME") ** 2)

    def step(w: Any, momentum: Any, x: Any) -> Any:
        momentum = 0.9 * momentum + jax.grad(loss)(w, x)
        return w - 0.1 * momentum, momentum

    weight = array(m, (16, 4, 3, 3))
    return jax.jit(step, donate_argnums=(0, 1)), (weight, weight, array(m, (64, 4, 32, 32), "data"))


def _recurrence(*, by_hand: bool) -> Callable[[], Any]:
    """A linear recurrence over positions that are split, as a scan of halves or of each device's own."""

    def run() -> Any:
        m = mesh("context")

        def combined(first: Any, second: Any) -> Any:
            return first[0] * second[0], second[0] * first[1] + second[1]

        def own(a: Any, b: Any) -> Any:
            decays, states = lax.associative_scan(combined, (a, b), axis=1)
            totals = lax.all_gather((decays[:, -1], states[:, -1]), "context", axis=1)
            _, before = lax.associative_scan(combined, totals, axis=1)
            i = lax.axis_index("context")
            return states + decays * jnp.where(i > 0, before[:, i - 1], 0)[:, None]

        def forward(a: Any, b: Any) -> Any:
            if by_hand:
                split = P(None, "context")
                return jax.shard_map(own, mesh=m, in_specs=split, out_specs=split)(a, b)
            return lax.associative_scan(combined, (a, b), axis=1)[1]

        rows = array(m, (4, 2048, 64), None, "context")
        return jax.jit(forward), (rows, rows)

    return run


def _scaled(*, by_numpy: bool) -> Callable[[], Any]:
    """Attention's scores divided by a NumPy scalar, which promotes all that follows, or by a number."""

    def run() -> Any:
        m = mesh("tensor")

        def forward(x: Any, w: Any, w_out: Any) -> Any:
            scores = jnp.einsum("bth,bsh->bts", x @ w, x @ w) / (np.sqrt(64) if by_numpy else 8.0)
            return jnp.einsum("bts,bsh->bth", jax.nn.softmax(scores), x @ w) @ w_out

        shapes: list[tuple[Any, ...]] = [((64, 64, 64), "tensor"), ((64, 256),), ((256, 512),)]
        return jax.jit(forward), tuple(array(m, *shape, dtype=jnp.bfloat16) for shape in shapes)

    return run


def _dropout_by_hand(*, whole: bool) -> Callable[[], Any]:
    """Dropout in a shard_map with the random numbers of all rows, or of a device's own."""

    def run() -> Any:
        m = mesh("data")

        def local(w: Any, x: Any, key: Any) -> Any:
            h, i = jnp.tanh(x @ w), lax.axis_index("data")
            if whole:
                drawn = jax.random.uniform(key, (4096, h.shape[1]))
                drawn = lax.dynamic_slice_in_dim(drawn, i * h.shape[0], h.shape[0])
            else:
                drawn = jax.random.uniform(jax.random.fold_in(key, i), h.shape)
            return jnp.where(drawn < 0.9, h, 0)

        forward = jax.shard_map(local, mesh=m, in_specs=(P(), P("data"), P()), out_specs=P("data"))
        args = array(m, (64, 128)), array(m, (4096, 64), "data"), array(m, (2,), dtype=jnp.uint32)
        return jax.jit(forward), args

    return run


def _tables(*, exchanged: bool) -> Callable[[], Any]:
    """Look-ups of each example in several tables, of which each device has some."""

    def run() -> Any:
        m = mesh("data")

        def forward(tables: Any, ids: Any) -> Any:
            ids = constrained(m, ids) if exchanged else ids
            rows = jax.vmap(lambda table, i: table[i], in_axes=(0, 1), out_axes=1)(tables, ids)
            rows = constrained(m, rows, None, "data") if exchanged else rows
            rows = constrained(m, rows, "data")
            return jnp.einsum("bnd,bmd->bnm", rows, rows)

        args = array(m, (16, 8192, 16), "data"), array(m, (256, 16), "data", dtype=jnp.int32)
        return jax.jit(forward), args

    return run


def _buffers(*, whole: bool) -> Callable[[], Any]:
    """A pipeline that passes on all microbatches, or the one of the turn."""

    def run() -> Any:
        m = mesh("pipe")

        def local(w: Any, x: Any) -> Any:
            i = lax.axis_index("pipe")

            def turn(rows: Any, t: Any) -> Any:
                now, after = jnp.clip(t - i, 0, 7), jnp.clip(t + 1 - i, 0, 7)
                rows = rows.at[now].set(jnp.tanh(rows[now] @ w[0]))
                onward = [(at, at + 1) for at in range(7)]
                received = lax.ppermute(rows, "pipe", onward)[after] if whole else None
                received = lax.ppermute(rows[now], "pipe", onward) if received is None else received
                return jnp.where(i > 0, rows.at[after].set(received), rows), None

            return lax.scan(turn, lax.pcast(x, "pipe", to="varying"), jnp.arange(15))[0][None]

        run = jax.shard_map(local, mesh=m, in_specs=(P("pipe"), P()), out_specs=P("pipe"))
        return jax.jit(run), (array(m, (8, 64, 64), "pipe"), array(m, (8, 16, 64)))

    return run


def _logged(*, quantile: bool) -> Callable[[], Any]:
    """FSDP that logs a quantile of all gradients, or the mean of the devices' own."""

    def run() -> Any:
        m = mesh("fsdp")

        def step(w: Any, x: Any) -> Any:
            g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ constrained(m, w)) ** 2))(w)
            if quantile:
                return w - 0.1 * g, jnp.quantile(jnp.abs(g), 0.99)
            own = jax.shard_map(
                lambda g: lax.pmean(jnp.quantile(jnp.abs(g), 0.99), "fsdp"),
                mesh=m,
                in_specs=P("fsdp"),
                out_specs=P(),
            )
            g = constrained(m, g, "fsdp")
            return w - 0.1 * g, own(g)

        args = array(m, (256, 256), "fsdp"), array(m, (512, 256), "fsdp")
        return jax.jit(step, donate_argnums=0), args

    return run


def _moments(*specs: str) -> Callable[[], Any]:
    """FSDP whose moments of the gradients' squares are whole."""

    def run() -> Any:
        m = mesh("fsdp")

        def step(w: Any, square: Any, x: Any) -> Any:
            g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ constrained(m, w)) ** 2))(w)
            square = 0.9 * square + 0.1 * g**2
            return w - 0.1 * g / (jnp.sqrt(square) + 1e-8), square

        weight, square = array(m, (256, 256), "fsdp"), array(m, (256, 256), *specs)
        return jax.jit(step, donate_argnums=(0, 1)), (weight, square, array(m, (512, 256), "fsdp"))

    return run


def _statistics(*, each: bool) -> Callable[[], Any]:
    """Means of each layer's activations over devices, one after another or all at once."""

    def run() -> Any:
        m = mesh("data")

        def local(ws: Any, x: Any) -> Any:
            def layer(x: Any, w: Any) -> Any:
                x = jnp.tanh(x @ w)
                return x, lax.pmean(jnp.mean(x), "data") if each else jnp.mean(x)

            x, means = lax.scan(layer, x, ws)
            return x, means if each else lax.pmean(means, "data")

        forward = jax.shard_map(local, mesh=m, in_specs=(P(), P("data")), out_specs=(P("data"), P()))
        return jax.jit(forward), (array(m, (32, 64, 64)), array(m, (64, 64), "data"))

    return run


def _embedded(*, multiplied: bool) -> Callable[[], Any]:
    """Rows of a table, looked up or by a product with one-hot rows."""

    def run() -> Any:
        m = mesh("data")

        def forward(table: Any, w: Any, tokens: Any) -> Any:
            x = jax.nn.one_hot(tokens, 2048) @ table if multiplied else table[tokens]
            return jnp.tanh(x @ w)

        tokens = array(m, (64, 32), "data", dtype=jnp.int32)
        return jax.jit(forward), (array(m, (2048, 64)), array(m, (64, 64)), tokens)

    return run


def _quantised(*, summed: bool) -> Callable[[], Any]:
    """Gradients quantised to int8 and summed as float32, or exchanged, summed and gathered as int8."""

    def run() -> Any:
        m = mesh("data")

        def quantised(g: Any) -> Any:
            return jnp.round(jnp.clip(g, -1, 1) * 127).astype(jnp.int8)

        def local(g: Any) -> Any:
            if summed:
                return lax.psum(quantised(g[0]).astype(jnp.float32), "data")
            parts = lax.all_to_all(quantised(g[0]), "data", 0, 0, tiled=True)
            own = jnp.mean(parts.reshape(8, -1, g.shape[-1]).astype(jnp.float32), 0) / 127
            return lax.all_gather(quantised(own), "data", tiled=True).astype(jnp.float32)

        run = jax.shard_map(local, mesh=m, in_specs=P("data"), out_specs=P(), check_vma=False)
        return jax.jit(run), (array(m, (8, 512, 512), "data"),)

    return run


def _masked_stages(*, microbatches: bool) -> Callable[[], Any]:
    """Stages that work one after another by a mask that is multiplied, or on microbatches that follow."""

    def run() -> Any:
        m = mesh("pipe")
        onward = [(at, (at + 1) % 8) for at in range(8)]

        def local(w: Any, x: Any) -> Any:
            i = lax.axis_index("pipe")

            def turn(h: Any, t: Any) -> Any:
                if microbatches:
                    h = jnp.tanh(jnp.where(i == 0, x[jnp.clip(t, 0, 7)], h) @ w[0])
                    return lax.ppermute(h, "pipe", onward), h
                on = (i == t).astype(h.dtype)
                h = on * jnp.tanh(h @ w[0]) + (1 - on) * h
                return lax.ppermute(h, "pipe", onward), None

            start = lax.pcast(x[0] if microbatches else x, "pipe", to="varying")
            h, rows = lax.scan(turn, start, jnp.arange(15 if microbatches else 8))
            return rows[None] if microbatches else h[None]

        run = jax.shard_map(local, mesh=m, in_specs=(P("pipe"), P()), out_specs=P("pipe"))
        rows = array(m, (8, 32, 64)) if microbatches else array(m, (256, 64))
        return jax.jit(run), (array(m, (8, 64, 64), "pipe"), rows)

    return run


def _orthogonalised(*, stacked: bool) -> Callable[[], Any]:
    """Updates of split weights by Newton-Schulz, each on all devices or each matrix on one."""

    def run() -> Any:
        m = mesh("fsdp")

        def iterated(x: Any) -> Any:
            for _ in range(3):
                a = x @ x.mT
                x = 3.4 * x - (4.8 * a - 2.0 * a @ a) @ x
            return x

        def loss(ws: Any, x: Any) -> Any:
            for w in ws:
                x = constrained(m, jnp.tanh(x @ constrained(m, w)), "fsdp")
            return jnp.mean(x**2)

        def step(ws: Any, x: Any) -> Any:
            gs = [constrained(m, g, "fsdp") for g in jax.grad(loss)(ws, x)]
            if not stacked:
                return [
                    w - constrained(m, iterated(constrained(m, g)), "fsdp")
                    for w, g in zip(ws, gs, strict=True)
                ]
            whole = constrained(m, constrained(m, jnp.stack(gs), None, "fsdp"), "fsdp")
            updates = constrained(m, constrained(m, iterated(whole), "fsdp"), None, "fsdp")
            return [w - updates[at] for at, w in enumerate(ws)]

        weight = array(m, (128, 128), "fsdp")
        return jax.jit(step, donate_argnums=0), ([weight] * 8, array(m, (512, 128), "fsdp"))

    return run


def _beams(*, flat: bool) -> Callable[[], Any]:
    """A cache in the order of its sequences' beams, by an index of all beams or within each sequence."""

    def run() -> Any:
        m = mesh("data")

        def reorder(cache: Any, parents: Any) -> Any:
            if flat:
                return cache[(parents + 4 * jnp.arange(16)[:, None]).reshape(-1)]
            rows = cache.reshape(16, 4, *cache.shape[1:])
            return jax.vmap(lambda rows, i: rows[i])(rows, parents).reshape(cache.shape)

        cache = array(m, (64, 128, 64), "data")
        return jax.jit(reorder, donate_argnums=0), (cache, array(m, (16, 4), "data", dtype=jnp.int32))

    return run


def _cross_attention(dim: int) -> Callable[[], Any]:
    """Keys and values of gathered rows in each layer: gathers of these would take longer."""

    def run() -> Any:
        m = mesh("context")

        def local(ws: Any, x: Any, encoded: Any) -> Any:
            rows = lax.all_gather(encoded, "context", axis=1, tiled=True)

            def layer(x: Any, w: Any) -> Any:
                scores = jnp.einsum("btd,bsd->bts", x @ w[0], rows @ w[1])
                return x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), rows @ w[2]), None

            return lax.scan(layer, x, ws)[0]

        split = P(None, "context")
        run = jax.shard_map(local, mesh=m, in_specs=(P(), split, split), out_specs=split)
        rows = array(m, (2, 512, dim), None, "context")
        return jax.jit(run), (array(m, (4, 3, dim, dim)), rows, rows)

    return run


def _columns(*, mapped: bool) -> Callable[[], Any]:
    """Scores of examples along a second dimension, in a loop that reads one in each turn, or all together."""

    def run() -> Any:
        m = mesh("data")

        def score(rows: Any, w: Any) -> Any:
            return jnp.mean(jnp.tanh(rows @ w) ** 2)

        def forward(w: Any, x: Any) -> Any:
            if mapped:
                return jax.vmap(score, in_axes=(1, None))(x, w)

            def turn(i: Any, scores: Any) -> Any:
                return scores.at[i].set(score(lax.dynamic_index_in_dim(x, i, 1, keepdims=False), w))

            return lax.fori_loop(0, x.shape[1], turn, jnp.zeros(x.shape[1]))

        return jax.jit(forward), (array(m, (64, 64)), array(m, (16, 32, 64), None, "data"))

    return run


OPERATIONS = {
    "a loss of gathered logits with its gradient": Case(
        "gathered_for_one_operation", _vocabulary_loss(gathered=True), _vocabulary_loss(gathered=False)
    ),
    "a sort, a sum and a look-up along one split dimension": Case(
        "gathered_for_one_operation", _nucleus(exchanged=False), _nucleus(exchanged=True)
    ),
    "a whole weight of split heads, wide": Case(
        "computed_repeatedly", _output_weight(8192, whole=True), _output_weight(8192, whole=False)
    ),
    "a whole weight of split heads, narrow": Case(None, _output_weight(256, whole=True)),
    "moments that take little memory": Case(None, _small_state),
    "an associative scan over split positions": Case(
        "gathered_for_one_operation", _recurrence(by_hand=False), _recurrence(by_hand=True)
    ),
    "scores divided by a NumPy scalar": Case("promoted", _scaled(by_numpy=True), _scaled(by_numpy=False)),
    "random numbers of all rows on each device": Case(
        "computed_repeatedly", _dropout_by_hand(whole=True), _dropout_by_hand(whole=False)
    ),
    "several tables, each on one device": Case(
        "table_gathered", _tables(exchanged=False), _tables(exchanged=True)
    ),
    "a pipeline that passes on all microbatches": Case(
        "sent_for_a_part", _buffers(whole=True), _buffers(whole=False)
    ),
    "a logged quantile of the gradients": Case(
        "summed_whole", _logged(quantile=True), _logged(quantile=False)
    ),
    "means of each layer over devices": Case(
        "summed_repeatedly", _statistics(each=True), _statistics(each=False)
    ),
    "a table multiplied by one-hot rows": Case(
        "one_hot_multiplied", _embedded(multiplied=True), _embedded(multiplied=False)
    ),
    "quantised gradients summed as float32": Case(
        "widened", _quantised(summed=True), _quantised(summed=False)
    ),
    "stages in turn by a mask": Case(
        "computed_repeatedly", _masked_stages(microbatches=False), _masked_stages(microbatches=True)
    ),
    "updates orthogonalised on all devices": Case(
        "update_gathered", _orthogonalised(stacked=False), _orthogonalised(stacked=True)
    ),
    "beams reordered by an index of all": Case("table_gathered", _beams(flat=True), _beams(flat=False)),
    "keys and values of gathered rows, narrow": Case(None, _cross_attention(64)),
    "a loop over examples along a second dimension": Case(
        "batch_gathered", _columns(mapped=False), _columns(mapped=True)
    ),
    "moments that are whole where weights are split": Case(
        "replicated_optimizer_state", _moments(), _moments("fsdp")
    ),
}
