"""Small programs that people met, each wrong in one way, and with the remedy applied.

A case is a function and the types of its arguments on eight devices; `kind`: the finding, or None for a
program that does what it is asked for.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Case(NamedTuple):
    """A program; kind: of its finding; fixed: the same with the remedy, without that finding."""

    kind: str | None
    run: Callable[[], tuple[Any, tuple[Any, ...]]]
    fixed: Callable[[], tuple[Any, tuple[Any, ...]]] | None = None


def mesh(axis: str) -> Mesh:
    return Mesh(np.array(jax.devices()[:8]), (axis,))


def array(m: Mesh, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(m, P(*spec)))


def constrained(m: Mesh, x: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(m, P(*spec)))


def _top_k() -> Any:
    m = mesh("tensor")
    args = array(m, (64, 512)), array(m, (512, 32768), None, "tensor")
    return jax.jit(lambda h, w: lax.top_k(h @ w, 8)), args


def _top_k_of_shards() -> Any:
    m = mesh("tensor")

    def local(h: Any, w: Any) -> Any:
        values, places = lax.top_k(h @ w, 8)
        places += lax.axis_index("tensor") * w.shape[1]
        values, places = (lax.all_gather(x, "tensor", axis=1, tiled=True) for x in (values, places))
        values, best = lax.top_k(values, 8)
        return values, jnp.take_along_axis(places, best, 1)

    run = jax.shard_map(local, mesh=m, in_specs=(P(), P(None, "tensor")), out_specs=P(), check_vma=False)
    return jax.jit(run), (array(m, (64, 512)), array(m, (512, 32768), None, "tensor"))


def _cumulative_sum() -> Any:
    m = mesh("x")
    out = NamedSharding(m, P(None, "x"))
    return jax.jit(lambda a: jnp.cumsum(a, axis=1), out_shardings=out), (array(m, (64, 65536), None, "x"),)


def _cumulative_sum_of_shards() -> Any:
    m = mesh("x")

    def local(a: Any) -> Any:
        own = jnp.cumsum(a, axis=1)
        totals = lax.all_gather(own[:, -1:], "x", axis=1, tiled=True)
        earlier = (jnp.arange(8) < lax.axis_index("x"))[None, :]
        return own + jnp.sum(jnp.where(earlier, totals, 0.0), axis=1, keepdims=True)

    run = jax.shard_map(local, mesh=m, in_specs=P(None, "x"), out_specs=P(None, "x"))
    return jax.jit(run), (array(m, (64, 65536), None, "x"),)


def _fourier() -> Any:
    m = mesh("x")
    run = jax.jit(lambda a: jnp.abs(jnp.fft.fft(a, axis=1)), out_shardings=NamedSharding(m, P(None, "x")))
    return run, (array(m, (256, 4096), None, "x", dtype=jnp.complex64),)


def _fourier_of_lines() -> Any:
    m = mesh("x")
    lines = jax.shard_map(lambda a: jnp.fft.fft(a, axis=1), mesh=m, in_specs=P("x"), out_specs=P("x"))
    return jax.jit(lambda a: jnp.abs(lines(a))), (array(m, (256, 4096), "x", dtype=jnp.complex64),)


def _sort(*spec: Any) -> Callable[[], Any]:
    def run() -> Any:
        m = mesh("x")
        out = NamedSharding(m, P(*spec))
        return jax.jit(lambda a: jnp.sort(a, axis=1), out_shardings=out), (array(m, (64, 65536), *spec),)

    return run


def _sort_of_logits(*, constrain: bool) -> Callable[[], Any]:
    """A sort of logits over a split vocabulary, or of whole rows after an all-to-all."""

    def run() -> Any:
        m = mesh("x")

        def sort(h: Any, w: Any) -> Any:
            logits = constrained(m, h @ w, None, "x")
            return jnp.sort(constrained(m, logits, "x") if constrain else logits, axis=1)[:, -64:]

        return jax.jit(sort), (array(m, (64, 512)), array(m, (512, 32768), None, "x"))

    return run


def _loss_of_logits(*spec: Any) -> Callable[[], Any]:
    """A cross-entropy of logits that a constraint gathers, or leaves split over the vocabulary."""

    def run() -> Any:
        m = mesh("x")

        def loss(h: Any, w: Any, targets: Any) -> Any:
            logits = constrained(m, (h @ w).astype(jnp.float32), *spec)
            hit = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(hit, logits, 0.0), -1))

        weight = array(m, (512, 32768), None, "x", dtype=jnp.bfloat16)
        rows = array(m, (512, 512), dtype=jnp.bfloat16), array(m, (512,), dtype=jnp.int32)
        return jax.jit(loss), (rows[0], weight, rows[1])

    return run


def _norm(*, concatenated: bool) -> Callable[[], Any]:
    """Gradients over their norm: of one array of all, or array by array."""

    def run() -> Any:
        m = mesh("x")
        split = NamedSharding(m, P("x"))

        def clipped(gradients: Any) -> Any:
            if concatenated:
                norm = jnp.linalg.norm(jnp.concatenate([jnp.ravel(g) for g in gradients]))
            else:
                norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
            return [g / norm for g in gradients]

        return jax.jit(clipped, out_shardings=[split, split]), ([array(m, (1024, 1024), "x")] * 2,)

    return run


def _accumulation(*, by_device: bool) -> Callable[[], Any]:
    """Gradients of microbatches, summed over devices in each turn of the loop, or once after it."""

    def run() -> Any:
        m = mesh("data")

        def total(w: Any, batches: Any) -> Any:
            def add(total: Any, x: Any) -> Any:
                return total + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), None

            return lax.scan(add, jnp.zeros_like(w), batches)[0]

        def local(w: Any, batches: Any) -> Any:
            return lax.pmean(total(w, batches), "data")

        specs = P(), P(None, "data")
        once = jax.shard_map(local, mesh=m, in_specs=specs, out_specs=P(), check_vma=False)
        args = array(m, (512, 1024)), array(m, (8, 1024, 512), None, "data")
        return jax.jit(once if by_device else total), args

    return run


def _columns(*spec: Any) -> Callable[[], Any]:
    """A product with the columns of a weight, which is stored by `spec`."""

    def run() -> Any:
        m = mesh("x")
        by_columns = jax.jit(lambda w, x: jax.nn.relu(x @ constrained(m, w, None, "x")))
        return by_columns, (array(m, (512, 4096), *spec), array(m, (512, 512)))

    return run


def _stack(*spec: Any) -> Callable[[], Any]:
    def run() -> Any:
        m = mesh("fsdp")

        def loss(ws: Any, x: Any) -> Any:
            h, _ = lax.scan(lambda h, w: (constrained(m, jnp.tanh(h @ w), "fsdp"), None), x, ws)
            return jnp.sum(h**2)

        ws = array(m, (8, 1024, 1024), *spec)
        return jax.jit(jax.grad(loss), out_shardings=ws.sharding), (ws, array(m, (64, 1024), "fsdp"))

    return run


def _fsdp(*spec: Any, constrain: bool) -> Callable[[], Any]:
    """Three layers of two matrices, written without or with constraints on activations."""

    def run() -> Any:
        m = mesh("data")

        def kept(x: Any) -> Any:
            return constrained(m, x, "data") if constrain else x

        def loss(params: Any, x: Any) -> Any:
            for w1, w2 in params:
                x = kept(x + kept(jnp.tanh(x @ w1)) @ w2)
            return jnp.mean(x**2)

        def step(params: Any, x: Any) -> Any:
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))

        pair = array(m, (1024, 4096), *spec), array(m, (4096, 1024), *spec)
        return jax.jit(step), ([pair] * 3, array(m, (2048, 1024), "data"))

    return run


def _fsdp_in_a_loop(*, constrain: bool) -> Callable[[], Any]:
    def run() -> Any:
        m = mesh("data")

        def kept(x: Any) -> Any:
            return constrained(m, x, "data") if constrain else x

        def loss(params: Any, x: Any) -> Any:
            def layer(h: Any, w: Any) -> Any:
                return kept(kept(h) + kept(jnp.tanh(h @ w[0])) @ w[1]), None

            return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

        def step(params: Any, x: Any) -> Any:
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))

        params = array(m, (4, 1024, 4096), None, None, "data"), array(m, (4, 4096, 1024), None, None, "data")
        out = jax.tree.map(lambda w: w.sharding, params)
        return jax.jit(step, out_shardings=out), (params, array(m, (2048, 1024), "data"))

    return run


def _both_sides(*, reduced: bool) -> Callable[[], Any]:
    def run() -> Any:
        m = mesh("x")

        def product(a: Any, b: Any) -> Any:
            if not reduced:
                a, b = constrained(m, a), constrained(m, b)
            return constrained(m, a @ b)

        return jax.jit(product), (array(m, (512, 4096), None, "x"), array(m, (4096, 512), "x"))

    return run


def _own_slice(*, scattered: bool) -> Callable[[], Any]:
    def run() -> Any:
        m = mesh("x")

        def local(a: Any, b: Any) -> Any:
            if scattered:
                return lax.psum_scatter(a @ b, "x", scatter_dimension=0, tiled=True)
            y = lax.psum(a @ b, "x")
            size = y.shape[0] // 8
            return lax.dynamic_slice_in_dim(y, lax.axis_index("x") * size, size, 0)

        split = jax.shard_map(local, mesh=m, in_specs=(P(None, "x"), P("x")), out_specs=P("x"))
        return jax.jit(split), (array(m, (1024, 4096), None, "x"), array(m, (4096, 512), "x"))

    return run


def _microbatches(*, constrain: bool) -> Callable[[], Any]:
    def run() -> Any:
        m = mesh("data")

        def step(w: Any, x: Any) -> Any:
            def add(total: Any, rows: Any) -> Any:
                return total + jnp.sum(jnp.tanh(rows @ w) ** 2), None

            if constrain:
                x = constrained(m, x.reshape(16, 4, 512).swapaxes(0, 1), None, "data")
            else:
                x = x.reshape(4, 16, 512)
            return lax.scan(add, jnp.float32(0), x)[0]

        return jax.jit(step), (array(m, (512, 512)), array(m, (64, 512), "data"))

    return run


def _rows(*, of_shards: bool) -> Callable[[], Any]:
    """Rows of a table at indices that are sharded over the table's axis."""

    def run() -> Any:
        m = mesh("x")
        args = array(m, (8192, 512), "x"), array(m, (8192,), "x", dtype=jnp.int32)
        if not of_shards:
            return jax.jit(lambda a, i: a[i], out_shardings=NamedSharding(m, P("x"))), args

        def local(a: Any, i: Any) -> Any:
            i = lax.all_gather(i, "x", tiled=True) - lax.axis_index("x") * a.shape[0]
            mine = (i >= 0) & (i < a.shape[0])
            rows = jnp.where(mine[:, None], a[jnp.clip(i, 0, a.shape[0] - 1)], 0.0)
            return lax.psum_scatter(rows, "x", scatter_dimension=0, tiled=True)

        return jax.jit(jax.shard_map(local, mesh=m, in_specs=P("x"), out_specs=P("x"))), args

    return run


def _pipeline() -> Any:
    m = mesh("pipe")

    def run(ws: Any, x: Any) -> Any:
        def tick(buffer: Any, i: Any) -> Any:
            buffer = constrained(m, jnp.roll(buffer, 1, axis=0).at[0].set(x[i]), "pipe")
            return jnp.tanh(jnp.einsum("pbd,pde->pbe", buffer, ws)), buffer[-1]

        return lax.scan(tick, jnp.zeros((8, 16, 256)), jnp.arange(16))[1]

    return jax.jit(run), (array(m, (8, 256, 256), "pipe"), array(m, (16, 16, 256)))


def _convolution() -> Any:
    m = mesh("x")

    def run(a: Any, k: Any) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(a, k, (1, 1), "SAME", dimension_numbers=dims)

    out = NamedSharding(m, P(None, "x"))
    return jax.jit(run, out_shardings=out), (array(m, (4, 256, 64, 16), None, "x"), array(m, (3, 3, 16, 16)))


def _ring() -> Any:
    m = mesh("context")

    def local(q: Any, k: Any, v: Any) -> Any:
        def turn(carried: Any, _: None) -> Any:
            k, v, out = carried
            out += jnp.tanh(q @ k.T) @ v
            to_next = [(i, (i + 1) % 8) for i in range(8)]
            return (*(lax.ppermute(x, "context", to_next) for x in (k, v)), out), None

        return lax.scan(turn, (k, v, jnp.zeros_like(q)), None, length=8)[0][2]

    run = jax.shard_map(local, mesh=m, in_specs=P("context"), out_specs=P("context"))
    return jax.jit(run), tuple(array(m, (4096, 128), "context") for _ in range(3))


def _two_matmuls(*spec: Any) -> Callable[[], Any]:
    """Blocks of two matmuls, whose second weight is stored by `spec`."""

    def made() -> Any:
        m = mesh("tp")

        def run(weights: Any, x: Any) -> Any:
            for first, second in weights:
                x += jnp.tanh(x @ first) @ second
            return x

        first, second = array(m, (512, 2048), None, "tp"), array(m, (2048, 512), *spec)
        jitted = jax.jit(run, out_shardings=NamedSharding(m, P()))
        return jitted, ([(first, second)] * 2, array(m, (4096, 512)))

    return made


def _constrained_logits(*spec: Any) -> Callable[[], Any]:
    """The gradient of a loss whose logits are constrained by `spec`, of a head split by its vocabulary."""

    def made() -> Any:
        m = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "tp"))

        def loss(w: Any, h: Any, targets: Any) -> Any:
            shares = jax.nn.log_softmax(constrained(m, h @ w, *spec))
            return -jnp.take_along_axis(shares, targets[:, None], 1).mean()

        h, targets = array(m, (2048, 256), "dp"), array(m, (2048,), "dp", dtype=jnp.int32)
        return jax.jit(jax.grad(loss)), (array(m, (256, 16384), None, "tp"), h, targets)

    return made


def _of_one(run: Callable[..., Any], *args: Any, out: Any = None) -> Callable[[], Any]:
    """A function of arrays given as (shape, spec)."""

    def made() -> Any:
        m = mesh("x")
        jitted = jax.jit(run) if out is None else jax.jit(run, out_shardings=NamedSharding(m, P(*out)))
        return jitted, tuple(array(m, shape, *spec, dtype=dtype) for shape, spec, dtype in args)

    return made


def _replicated_batch(*spec: Any) -> Callable[[], Any]:
    """A gradient over a batch stored by `spec`."""

    def made() -> Any:
        m = mesh("data")
        step = jax.jit(jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)))
        return step, (array(m, (512, 2048)), array(m, (1024, 512), *spec))

    return made


def _rows_one_by_one(*, mapped: bool) -> Callable[[], Any]:
    """A function of each sequence: in a loop over the split batch, or vectorised."""

    def made() -> Any:
        m = mesh("data")

        def run(w: Any, x: Any) -> Any:
            each = lambda rows: jnp.tanh(rows @ w)  # noqa: E731
            return lax.map(each, x) if mapped else jax.vmap(each)(x)

        return jax.jit(run), (array(m, (512, 512)), array(m, (64, 32, 512), "data"))

    return made


def _rotated(*spec: Any) -> Callable[[], Any]:
    """Rotary halves of heads that are stored by `spec`."""

    def made() -> Any:
        m = mesh("tensor")

        def run(x: Any, cosines: Any) -> Any:
            a, b = jnp.split(constrained(m, jnp.tanh(x), *spec), 2, -1)
            turned = [a * cosines - b * cosines, b * cosines + a * cosines]
            return constrained(m, 2 * jnp.concatenate(turned, -1), *spec)

        return jax.jit(run), (array(m, (8, 512, 16, 128), *spec), array(m, (512, 1, 64)))

    return made


def _nucleus(*, constrain: bool) -> Callable[[], Any]:
    """The size of the smallest set of tokens with 90% of the probability."""

    def made() -> Any:
        m = mesh("tensor")

        def run(h: Any, w: Any) -> Any:
            logits = constrained(m, h @ w, None, "tensor")
            logits = constrained(m, logits, "tensor") if constrain else logits
            shares = jax.nn.softmax(jnp.sort(logits, -1)[:, ::-1], -1)
            return jnp.sum(jnp.cumsum(shares, -1) < 0.9, -1)

        return jax.jit(run), (array(m, (64, 512)), array(m, (512, 32768), None, "tensor"))

    return made


def _wide_weights(*, cast_first: bool) -> Callable[[], Any]:
    def made() -> Any:
        m = mesh("data")

        def run(w: Any, x: Any) -> Any:
            w = constrained(m, w.astype(jnp.bfloat16), "data") if cast_first else w
            return constrained(m, x @ constrained(m, w).astype(jnp.bfloat16), "data")

        rows = array(m, (4096, 4096), "data", dtype=jnp.bfloat16)
        return jax.jit(run), (array(m, (4096, 4096), "data"), rows)

    return made


def _adam(*spec: Any) -> Callable[[], Any]:
    """Data parallelism with moments stored by `spec`."""

    def made() -> Any:
        m = mesh("data")

        def step(w: Any, mu: Any, nu: Any, x: Any) -> Any:
            g = constrained(m, jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), *spec)
            mu, nu = 0.9 * mu + 0.1 * g, 0.99 * nu + 0.01 * g * g
            return constrained(m, w - constrained(m, mu / (jnp.sqrt(nu) + 1e-8), *spec)), mu, nu

        moment = array(m, (1024, 4096), *spec)
        return jax.jit(step), (array(m, (1024, 4096)), moment, moment, array(m, (4096, 1024), "data"))

    return made


def _largest_so_far(*, of_shards: bool) -> Callable[[], Any]:
    def made() -> Any:
        m = mesh("x")

        def local(a: Any) -> Any:
            own = lax.cummax(a, axis=1)
            last = lax.all_gather(own[:, -1:], "x", axis=1, tiled=True)
            earlier = (jnp.arange(8) < lax.axis_index("x"))[None]
            return jnp.maximum(own, jnp.where(earlier, last, -jnp.inf).max(1, keepdims=True))

        args = (array(m, (64, 65536), None, "x"),)
        if of_shards:
            by_columns = P(None, "x")
            return jax.jit(jax.shard_map(local, mesh=m, in_specs=by_columns, out_specs=by_columns)), args
        out = NamedSharding(m, P(None, "x"))
        return jax.jit(lambda a: lax.cummax(a, axis=1), out_shardings=out), args

    return made


def _split_cache(*, whole: bool) -> Callable[[], Any]:
    """A token over a cache that is split by position, gathered or not."""

    def made() -> Any:
        m = mesh("x")

        def run(q: Any, k: Any, v: Any) -> Any:
            k, v = (constrained(m, x) for x in (k, v)) if whole else (k, v)
            shares = jax.nn.softmax(jnp.einsum("bnh,bsnh->bns", q, k), -1)
            return constrained(m, jnp.einsum("bns,bsnh->bnh", shares, v))

        cache = array(m, (8, 4096, 8, 64), None, "x")
        return jax.jit(run), (array(m, (8, 8, 64)), cache, cache)

    return made


def _tied_head(*spec: Any) -> Callable[[], Any]:
    """Logits by a table that is stored by `spec`."""

    def made() -> Any:
        m = mesh("tensor")

        def run(table: Any, h: Any) -> Any:
            of_width = spec[0] is None
            return jax.nn.logsumexp(constrained(m, h, None, "tensor" if of_width else None) @ table.T, -1)

        return jax.jit(run), (array(m, (32768, 1024), *spec), array(m, (16384, 1024)))

    return made


def _all_experts(*, gathered: bool) -> Callable[[], Any]:
    def made() -> Any:
        m = mesh("expert")

        def run(w: Any, x: Any, gates: Any) -> Any:
            w = constrained(m, w) if gathered else w
            return constrained(m, jnp.einsum("etf,te->tf", jnp.einsum("td,edf->etf", x, w), gates))

        return jax.jit(run), (array(m, (8, 512, 512), "expert"), array(m, (64, 512)), array(m, (64, 8)))

    return made


def _ulysses() -> Any:
    """Attention by heads: an exchange of queries, keys and values, and of the results back."""
    m = mesh("context")

    def run(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (constrained(m, x, None, None, "context") for x in (q, k, v))
        shares = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k), -1)
        return constrained(m, jnp.einsum("bnts,bsnh->btnh", shares, v), None, "context")

    x = array(m, (2, 1024, 16, 64), None, "context")
    return jax.jit(run), (x, x, x)


def _layer_norm(x: Any, w: Any) -> Any:
    normed = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return normed @ w


def _masked_mean(w: Any, x: Any, mask: Any) -> Any:
    return jnp.sum(jnp.sum((x @ w) ** 2, -1) * mask) / jnp.sum(mask)


def _cross_entropy(h: Any, w: Any, targets: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(h @ w), targets[:, None], 1).mean()


def _returned(*, whole: bool) -> Any:
    """A step of FSDP that returns its weights whole, or as they came."""

    def build() -> Any:
        m = mesh("fsdp")
        weights = {f"w{number}": array(m, (2048, 2048), "fsdp") for number in range(3)}

        def loss(weights: Any, x: Any) -> Any:
            for name in sorted(weights):
                x = constrained(m, jax.nn.gelu(x @ constrained(m, weights[name])), "fsdp")
            return jnp.mean(x**2)

        def step(weights: Any, x: Any) -> Any:
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

        out = NamedSharding(m, P()) if whole else jax.tree.map(lambda w: w.sharding, weights)
        return jax.jit(step, out_shardings=out), (weights, array(m, (4096, 2048), "fsdp"))

    return build


def _experts_by_groups(*hidden: str | None) -> Any:
    """Experts of dispatched rows, with what is between their matmuls constrained by `hidden`."""

    def build() -> Any:
        m = mesh("expert")

        def run(x: Any, w_in: Any, w_out: Any) -> Any:
            rows = constrained(m, x, None, "expert")
            between = jax.nn.relu(jnp.einsum("gecd,edf->gecf", rows, w_in))
            y = jnp.einsum("gecf,efd->gecd", constrained(m, between, *hidden), w_out)
            return constrained(m, constrained(m, y, None, "expert"), "expert")

        weights = array(m, (8, 512, 2048), "expert"), array(m, (8, 2048, 512), "expert")
        return jax.jit(run), (array(m, (8, 8, 64, 512), "expert"), *weights)

    return build


def _printing(*, prints: bool) -> Any:
    """A loop over layers that prints a mean in each turn, or not."""

    def build() -> Any:
        m = mesh("data")

        def layer(x: Any, w: Any) -> Any:
            x = jnp.tanh(x @ w)
            if prints:
                jax.debug.print("mean {mean}", mean=jnp.mean(x))
            return constrained(m, x, "data"), None

        run = jax.jit(lambda x, w: lax.scan(layer, x, w)[0])
        return run, (array(m, (2048, 1024), "data"), array(m, (4, 1024, 1024)))

    return build


def _two_axes(*spec: str | None) -> Any:
    """The gradient of a feed-forward on two axes, whose second weight is stored by `spec`."""

    def build() -> Any:
        m = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"))

        def loss(weights: Any, x: Any) -> Any:
            between = constrained(m, jax.nn.relu(x @ weights["in"]), "data", None, "tensor")
            return jnp.sum(constrained(m, x + between @ weights["out"], "data") ** 2)

        weights = {"in": array(m, (1024, 4096), None, "tensor"), "out": array(m, (4096, 1024), *spec)}
        return jax.jit(jax.grad(loss)), (weights, array(m, (16, 256, 1024), "data"))

    return build


def _recurrence(*spec: str | None) -> Any:
    """A recurrent cell over a sequence that is stored by `spec`."""

    def build() -> Any:
        m = mesh("data")

        def run(x: Any, w: Any, u: Any) -> Any:
            steps, state = jnp.swapaxes(x, 0, 1), jnp.zeros((x.shape[0], w.shape[0]))
            if spec[0]:
                steps, state = constrained(m, steps, None, spec[0]), constrained(m, state, spec[0])

            def cell(h: Any, xt: Any) -> tuple[Any, Any]:
                h = jnp.tanh(h @ w + xt @ u)
                return h, h

            return lax.scan(cell, state, steps)[1]

        return jax.jit(run), (array(m, (64, 512, 256), *spec), array(m, (256, 256)), array(m, (256, 256)))

    return build


def _causal_convolution() -> Any:
    """Four taps along positions that are split over devices."""
    m = mesh("context")

    def run(x: Any, w: Any) -> Any:
        padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        y = sum(padded[:, tap : tap + x.shape[1]] * w[tap] for tap in range(4))
        return constrained(m, jax.nn.silu(y), None, "context")

    return jax.jit(run), (array(m, (8, 8192, 1024), None, "context"), array(m, (4, 1024)))


def _stages_in_one_array() -> Any:
    """A pipeline of GSPMD: all stages under vmap, whose state is rolled along the stages."""
    m = mesh("stage")

    def run(w: Any, x: Any) -> Any:
        def tick(state: Any, row: Any) -> Any:
            state = constrained(m, state.at[0].set(row), "stage")
            y = constrained(m, jax.vmap(lambda w, s: jax.nn.relu(s @ w))(w, state), "stage")
            return constrained(m, jnp.roll(y, 1, 0), "stage"), y[-1]

        return lax.scan(tick, constrained(m, jnp.zeros((8, *x.shape[1:])), "stage"), x)[1]

    return jax.jit(run), (array(m, (8, 1024, 1024), "stage"), array(m, (16, 256, 1024)))


def _state_along(*spec: str | None) -> Callable[[], Any]:
    """Momentum of FSDP's weights that is stored by `spec`; the weights are split by rows."""

    def made() -> Any:
        m = mesh("fsdp")
        weights = {f"w{i}": array(m, (1024, 1024), "fsdp") for i in range(2)}
        state = {name: array(m, (1024, 1024), *spec) for name in weights}

        def loss(w: Any, x: Any) -> Any:
            for name in sorted(w):
                x = constrained(m, jnp.tanh(x @ constrained(m, w[name])), "fsdp")
            return jnp.mean(x**2)

        def step(w: Any, state: Any, x: Any) -> Any:
            state = jax.tree.map(lambda s, g: 0.9 * s + g, state, jax.grad(loss)(w, x))
            return jax.tree.map(lambda w, s: w - 0.1 * s, w, state), state

        out = jax.tree.map(lambda one: one.sharding, (weights, state))
        return jax.jit(step, out_shardings=out), (weights, state, array(m, (4096, 1024), "fsdp"))

    return made


def _evaluation(*, whole: bool) -> Callable[[], Any]:
    """Accuracy of a batch, with its logits returned to every device or not at all."""

    def made() -> Any:
        m = mesh("data")

        def run(x: Any, w: Any, targets: Any) -> Any:
            logits = constrained(m, x @ w, "data")
            correct = jnp.mean(jnp.argmax(logits, -1) == targets)
            return (correct, logits) if whole else (correct,)

        out = (NamedSharding(m, P()),) * (2 if whole else 1)
        args = (
            array(m, (4096, 256), "data"),
            array(m, (256, 8192)),
            array(m, (4096,), "data", dtype=jnp.int32),
        )
        return jax.jit(run, out_shardings=out), args

    return made


def _orthogonalised(*, whole: bool) -> Callable[[], Any]:
    """Turns of Newton and Schulz of eight matrices: of split rows, or of a whole matrix on each device."""

    def made() -> Any:
        m = mesh("fsdp")

        def turn(g: Any) -> Any:
            return 1.5 * g - 0.5 * (g @ g.T) @ g

        def run(g: Any) -> Any:
            if whole:
                g = constrained(m, g, "fsdp")
            g = lax.fori_loop(0, 5, lambda i, x: jax.vmap(turn)(x), g)
            return constrained(m, g, None, "fsdp")

        return jax.jit(run), (array(m, (8, 512, 1024), None, "fsdp"),)

    return made


def _heads(count: int) -> Callable[[], Any]:
    """Attention with `count` heads over eight devices; the joined heads divide."""

    def made() -> Any:
        m = mesh("tensor")

        def run(x: Any, wq: Any, wk: Any, wv: Any) -> Any:
            q, k, v = (jnp.reshape(x @ w, (4, 256, count, 64)) for w in (wq, wk, wv))
            scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k), -1)
            return jnp.einsum("bnts,bsnh->btnh", scores, v)

        weight = array(m, (256, count * 64), None, "tensor")
        return jax.jit(run), (array(m, (4, 256, 256)), weight, weight, weight)

    return made


def _contrastive() -> Any:
    """CLIP's loss: each text is compared with all images of the batch."""
    m = mesh("data")

    def loss(a: Any, b: Any, x: Any, y: Any) -> Any:
        u, v = (one / jnp.linalg.norm(one, axis=-1, keepdims=True) for one in (x @ a, y @ b))
        rows = jnp.arange(len(u))
        return -jnp.mean(jax.nn.log_softmax(constrained(m, 20 * u @ v.T, "data"), -1)[rows, rows])

    args = (
        array(m, (768, 512)),
        array(m, (640, 512)),
        array(m, (4096, 768), "data"),
        array(m, (4096, 640), "data"),
    )
    return jax.jit(jax.grad(loss, argnums=(0, 1))), args


def _low_rank(first: tuple[str | None, ...], second: tuple[str | None, ...]) -> Callable[[], Any]:
    """The gradient of a frozen weight's low-rank update, whose two matrices are stored by these specs."""

    def made() -> Any:
        m = mesh("tensor")

        def loss(update: Any, x: Any, w: Any) -> Any:
            y = constrained(m, x @ w, None, None, "tensor") + (x @ update["a"]) @ update["b"]
            return jnp.mean(constrained(m, jax.nn.relu(y), None, None, "tensor") ** 2)

        update = {"a": array(m, (1024, 16), *first), "b": array(m, (16, 4096), *second)}
        return jax.jit(jax.grad(loss)), (
            update,
            array(m, (8, 1024, 1024)),
            array(m, (1024, 4096), None, "tensor"),
        )

    return made


def _dequantised(*, first: bool) -> Callable[[], Any]:
    """A product with a frozen int8 weight, dequantised before its gather or after."""

    def made() -> Any:
        m = mesh("fsdp")

        def run(w: Any, scale: Any, x: Any) -> Any:
            if first:
                return constrained(m, x @ constrained(m, w.astype(jnp.bfloat16) * scale), "fsdp")
            return constrained(m, x @ (constrained(m, w).astype(jnp.bfloat16) * scale), "fsdp")

        weight = array(m, (2048, 2048), "fsdp", dtype=jnp.int8), array(m, (2048,), dtype=jnp.bfloat16)
        return jax.jit(run), (*weight, array(m, (4096, 2048), "fsdp", dtype=jnp.bfloat16))

    return made


def _scaled_to_fp8(*, first: bool) -> Callable[[], Any]:
    """A weight scaled and cast to fp8 on each device before its gather, or whole after it."""

    def made() -> Any:
        m = mesh("fsdp")

        def cast(x: Any) -> tuple[Any, Any]:
            scale = jnp.max(jnp.abs(x.astype(jnp.float32))) / 448
            return (x / scale.astype(x.dtype)).astype(jnp.float8_e4m3fn), scale

        def run(w: Any, x: Any) -> Any:
            narrow, scale = cast(w if first else constrained(m, w))
            narrow = constrained(m, constrained(m, narrow, "fsdp")) if first else narrow
            rows, of_rows = cast(x)
            y = jnp.matmul(rows, narrow, preferred_element_type=jnp.float32) * scale * of_rows
            return constrained(m, y, "fsdp")

        wide = (array(m, shape, "fsdp", dtype=jnp.bfloat16) for shape in ((2048, 2048), (4096, 2048)))
        return jax.jit(run), tuple(wide)

    return made


def _roots(*, whole: bool) -> Callable[[], Any]:
    """Eigenvalues of eight matrices, which are split by rows or one on each device."""

    def made() -> Any:
        m = mesh("fsdp")
        by_matrix = jax.shard_map(
            lambda s: jnp.linalg.eigvalsh(s), mesh=m, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False
        )

        def run(s: Any) -> Any:
            s = jnp.tanh(s)
            return by_matrix(constrained(m, s, "fsdp")) if whole else jnp.linalg.eigvalsh(s)

        return jax.jit(run), (array(m, (8, 256, 256), None, "fsdp"),)

    return made


def _stack_in_a_loop(*, before: bool) -> Callable[[], Any]:
    """A stack of layers gathered before the loop, or a layer gathered in each turn."""

    def made() -> Any:
        m = mesh("fsdp")

        def run(ws: Any, x: Any) -> Any:
            ws = constrained(m, ws) if before else ws
            return lax.scan(
                lambda h, w: (constrained(m, jnp.tanh(h @ constrained(m, w)), "fsdp"), None), x, ws
            )[0]

        return jax.jit(run), (array(m, (8, 512, 512), None, None, "fsdp"), array(m, (2048, 512), "fsdp"))

    return made


def _sharded_moments() -> Any:
    """ZeRO-1: moments are sharded; weights are whole as arguments and as results."""
    m = mesh("data")
    weights = [array(m, (1024, 1024))] * 2
    moments = [array(m, (1024, 1024), "data")] * 2

    def step(weights: Any, moments: Any, x: Any) -> Any:
        gradients = jax.grad(lambda ws: jnp.mean((jnp.tanh(x @ ws[0]) @ ws[1]) ** 2))(weights)
        moments = [0.9 * s + constrained(m, g, "data") for s, g in zip(moments, gradients, strict=True)]
        return [w - 0.1 * s for w, s in zip(weights, moments, strict=True)], moments

    out = jax.tree.map(lambda one: one.sharding, (weights, moments))
    return jax.jit(step, out_shardings=out), (weights, moments, array(m, (4096, 1024), "data"))


def _messages(*, by_features: bool) -> Callable[[], Any]:
    """A graph's messages: nodes and edges are split over the same devices, or messages by their features."""

    def program() -> Any:
        m = mesh("data")

        def run(x: Any, w: Any, source: Any, target: Any) -> Any:
            rows = x @ w
            if by_features:
                rows = constrained(m, constrained(m, rows, "data"), None, "data")
                source, target = constrained(m, source), constrained(m, target)
            sums = jax.ops.segment_sum(rows[source], target, num_segments=x.shape[0])
            sums = constrained(m, sums, None, "data") if by_features else sums
            return constrained(m, jax.nn.relu(sums), "data")

        edges = array(m, (32768,), "data", dtype=jnp.int32)
        return jax.jit(run), (array(m, (8192, 256), "data"), array(m, (256, 128)), edges, edges)

    return program


def _likeliest_in_a_loop() -> Any:
    """Tokens that are the likeliest of a vocabulary split over devices, one after another."""
    m = mesh("tensor")

    def run(table: Any, head: Any, tokens: Any) -> Any:
        def turn(_: Any, tokens: Any) -> Any:
            return jnp.argmax(constrained(m, table[tokens] @ head, None, "tensor"), -1).astype(jnp.int32)

        return lax.fori_loop(0, 8, turn, tokens)

    tokens = array(m, (4096,), dtype=jnp.int32)
    return jax.jit(run), (array(m, (32768, 128)), array(m, (128, 32768), None, "tensor"), tokens)


def _rows_of_sequences(*, counted: bool) -> Callable[[], Any]:
    """Rows of each sequence, written and read by indices that count the batch, or by batched ones."""

    def run() -> Any:
        m = mesh("data")

        def step(cache: Any, new: Any, at: Any, w: Any) -> Any:
            batch = jnp.arange(64)
            if counted:
                cache = cache.at[batch, at[:, 0]].set(new)
                rows = cache[batch[:, None], at]
            else:
                cache = jax.vmap(lambda one, i, x: one.at[i].set(x))(cache, at[:, 0], new)
                rows = jnp.take_along_axis(cache, at[..., None], 1)
            return cache, rows @ w

        args = array(m, (64, 128, 256), "data"), array(m, (64, 256), "data")
        at = array(m, (64, 32), "data", dtype=jnp.int32)
        return jax.jit(step, donate_argnums=0), (*args, at, array(m, (256, 256)))

    return run


def _shuffled(*, whole: bool) -> Callable[[], Any]:
    """A batch shuffled across devices, or each device's rows, before two updates."""

    def run() -> Any:
        m = mesh("data")

        def step(w: Any, x: Any, labels: Any, orders: Any) -> Any:
            def update(w: Any, order: Any) -> Any:
                rows, of_rows = x[order], labels[order]
                if not whole:
                    local = jax.vmap(lambda x, i: x[i])
                    parts = order[: 1024 // 8] % (1024 // 8)
                    by_device = (x.reshape(8, -1, 256), labels.reshape(8, -1), jnp.tile(parts, (8, 1)))
                    x8, labels8, i8 = (constrained(m, part, "data") for part in by_device)
                    rows, of_rows = local(x8, i8).reshape(x.shape), local(labels8, i8).reshape(labels.shape)

                def loss(w: Any) -> Any:
                    scores = jax.nn.log_softmax(constrained(m, rows, "data") @ w)
                    return -jnp.mean(jnp.sum(scores * jax.nn.one_hot(of_rows, 64), -1))

                return w - 0.1 * jax.grad(loss)(w), None

            return lax.scan(update, w, orders)[0]

        labels = array(m, (1024,), "data", dtype=jnp.int32)
        orders = array(m, (2, 1024), dtype=jnp.int32)
        return jax.jit(step), (array(m, (256, 64)), array(m, (1024, 256), "data"), labels, orders)

    return run


def _all_in_one(*, flat: bool) -> Callable[[], Any]:
    """FSDP of weights that are slices of one long array, or arrays of their own."""

    def run() -> Any:
        m, width = mesh("fsdp"), 256

        def loss(weights: Any, x: Any) -> Any:
            size = width * width
            for n in range(4):
                w = weights[n * size :][:size].reshape(width, width) if flat else weights[n]
                x = constrained(m, jnp.tanh(x @ w), "fsdp")
            return jnp.mean(x**2)

        def step(weights: Any, x: Any) -> Any:
            gradients = jax.grad(loss)(weights, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

        one = [array(m, (width, width), "fsdp")] * 4
        weights = array(m, (4 * width * width,), "fsdp") if flat else one
        return jax.jit(step, donate_argnums=0), (weights, array(m, (512, width), "fsdp"))

    return run


def _prefixes(*spec: str | tuple[str, ...]) -> Callable[[], Any]:
    """Norms of prefixes of rows that are stored by `spec`, as nested embeddings have them."""

    def run() -> Any:
        m = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"))

        def forward(w: Any, x: Any, y: Any) -> Any:
            e = constrained(m, x @ w, *spec)
            norms = [jnp.linalg.norm(part[:, :n], axis=-1) for n in (64, 128, 256) for part in (e, y)]
            return jnp.stack(norms)

        rows = array(m, (1024, 512), "data")
        return jax.jit(forward), (array(m, (512, 512)), rows, rows)

    return run


def _mean_over_positions() -> Any:
    """The gradient of a mean over split positions, which is the same at each position."""
    m = mesh("seq")

    def loss(w: Any, x: Any) -> Any:
        x = constrained(m, x + jax.nn.gelu(x @ w["in"]) @ w["out"], None, "seq")
        return jnp.mean(jnp.mean(x, 1) ** 2)

    w = {"in": array(m, (128, 512)), "out": array(m, (512, 128))}
    return jax.jit(jax.grad(loss)), (w, array(m, (8, 256, 128), None, "seq"))


def _dense_after_rows() -> Any:
    """A gradient of a dense layer of flattened images whose rows are split, with weights on all devices."""
    m = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "rows"))

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = constrained(m, jax.nn.relu(x @ w["k"]), "data", "rows")
            return jnp.mean(constrained(m, h.reshape(64, -1) @ w["d"], "data") ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    w = {"k": array(m, (16, 16)), "d": array(m, (32 * 32 * 16, 256))}
    return jax.jit(step, donate_argnums=0), (w, array(m, (64, 32, 32, 16), "data", "rows"))


def _codebooks(*, apart: bool) -> Callable[[], Any]:
    """Sums of rows of four tables that are split by their rows: each summed over devices, or all at once."""

    def run() -> Any:
        m = mesh("tensor")

        def local(tables: Any, ids: Any) -> Any:
            rows, first = tables.shape[1], lax.axis_index("tensor") * tables.shape[1]
            is_own = (ids >= first) & (ids < first + rows)
            own = jnp.clip(ids - first, 0, rows - 1)
            return lax.psum(
                sum(jnp.where(is_own[n, :, None], tables[n, own[n]], 0) for n in range(4)), "tensor"
            )

        specs = P(None, "tensor"), P()
        split = jax.shard_map(local, mesh=m, in_specs=specs, out_specs=P(), check_vma=False)

        def forward(tables: Any, ids: Any) -> Any:
            return jnp.tanh(sum(tables[n, ids[n]] for n in range(4)) if apart else split(tables, ids))

        tables, ids = array(m, (4, 2048, 256), None, "tensor"), array(m, (4, 512), dtype=jnp.int32)
        return jax.jit(forward), (tables, ids)

    return run


def _head_elements(*spec: str | None) -> Callable[[], Any]:
    """Scores of attention between heads that are stored by `spec`."""

    def run() -> Any:
        m = mesh("tensor")
        heads = array(m, (4, 256, 8, 64), None, None, *spec)
        return jax.jit(lambda q, k: jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))), (heads, heads)

    return run


def _written_at(*spec: str | None) -> Callable[[], Any]:
    """Four positions written into a cache that is stored by `spec`."""

    def run() -> Any:
        m = mesh("x")

        def step(cache: Any, new: Any, q: Any, at: Any) -> Any:
            cache = lax.dynamic_update_slice(cache, new, (0, at, 0, 0))
            return cache, jax.nn.softmax(jnp.einsum("bhk,bthk->bht", q, cache))

        cache = array(m, (4, 1024, 8, 64), *spec)
        new, q = array(m, (4, 4, 8, 64), None, None, spec[-1]), array(m, (4, 8, 64), None, spec[-1])
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(cache.sharding, None))
        return jitted, (cache, new, q, array(m, (), dtype=jnp.int32))

    return run


def _negatives(*spec: str) -> Callable[[], Any]:
    """A contrastive gradient with a queue of negatives, stored by `spec`, to which the batch is written."""

    def run() -> Any:
        m = mesh("data")

        def step(w: Any, x: Any, y: Any, queue: Any, at: Any) -> Any:
            def loss(w: Any) -> Any:
                q = x @ w
                logits = jnp.concatenate([jnp.sum(q * y, -1, keepdims=True), q @ queue.T], 1)
                return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

            return w - 0.1 * jax.grad(loss)(w), lax.dynamic_update_slice(queue, y, (at, 0))

        rows = array(m, (256, 256), "data")
        queue, at = array(m, (8192, 256), *spec), array(m, (), dtype=jnp.int32)
        return jax.jit(step, donate_argnums=(0, 3)), (array(m, (256, 256)), rows, rows, queue, at)

    return run


def _features() -> Any:
    """A gradient of features looked up in a large table, which is on every device."""
    m = mesh("data")

    def step(w: Any, ids: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            rows = constrained(m, w["table"][ids], "data")
            scores = jnp.tanh(jnp.einsum("bfd,fde->be", rows, w["in"])) @ w["out"]
            return jnp.mean((scores[:, 0] - y) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))

    w = {"in": array(m, (4, 32, 128)), "out": array(m, (128, 1)), "table": array(m, (65536, 32))}
    ids, y = array(m, (256, 4), "data", dtype=jnp.int32), array(m, (256,), "data")
    out = jax.tree.map(lambda w: w.sharding, w)
    return jax.jit(step, donate_argnums=0, out_shardings=out), (w, ids, y)


def _beams(*, apart: bool) -> Callable[[], Any]:
    """Caches of beams in the order of their parents, with beams and sequences in one dimension or two."""

    def run() -> Any:
        m = mesh("data")

        def step(cache: Any, parents: Any) -> Any:
            return jnp.take_along_axis(cache, parents[..., None, None], 1) if apart else cache[parents]

        first = (16, 4) if apart else (64,)
        parents = array(m, first, "data", dtype=jnp.int32)
        return jax.jit(step), (array(m, (*first, 128, 64), "data"), parents)

    return run


_F, _I = jnp.float32, jnp.int32
_HEAD = ((64, 512), (), _F), ((512, 32768), (None, "x"), _F)
CASES: dict[str, Case] = {
    "top k of logits": Case("gathered_for_one_operation", _top_k, _top_k_of_shards),
    "a cumulative sum": Case("gathered_for_one_operation", _cumulative_sum, _cumulative_sum_of_shards),
    "a Fourier transform": Case("gathered_for_one_operation", _fourier, _fourier_of_lines),
    "a sort": Case("gathered_for_one_operation", _sort(None, "x"), _sort("x", None)),
    "a sort of logits": Case(
        "gathered_for_one_operation", _sort_of_logits(constrain=False), _sort_of_logits(constrain=True)
    ),
    "logits of a loss": Case("gathered_for_one_operation", _loss_of_logits(), _loss_of_logits(None, "x")),
    "a norm of one long array": Case(
        "gathered_for_one_operation", _norm(concatenated=True), _norm(concatenated=False)
    ),
    "gradients of microbatches": Case(
        "summed_repeatedly", _accumulation(by_device=False), _accumulation(by_device=True)
    ),
    "rows stored, columns used": Case("weight_resharded", _columns("x"), _columns(None, "x")),
    "a stack sharded by layer": Case("stack_gathered", _stack("fsdp"), _stack(None, "fsdp")),
    "FSDP": Case(
        "activations_not_constrained", _fsdp("data", constrain=False), _fsdp("data", constrain=True)
    ),
    "FSDP by columns": Case(
        "activations_not_constrained",
        _fsdp(None, "data", constrain=False),
        _fsdp(None, "data", constrain=True),
    ),
    "FSDP in a loop": Case(
        "activations_not_constrained", _fsdp_in_a_loop(constrain=False), _fsdp_in_a_loop(constrain=True)
    ),
    "both operands gathered": Case(
        "contraction_gathered", _both_sides(reduced=False), _both_sides(reduced=True)
    ),
    "both matmuls by columns": Case("contraction_gathered", _two_matmuls(None, "tp"), _two_matmuls("tp")),
    "logits constrained to be whole": Case(
        "computed_repeatedly", _constrained_logits("dp"), _constrained_logits("dp", "tp")
    ),
    "a sum's own slice": Case("summed_whole", _own_slice(scattered=False), _own_slice(scattered=True)),
    "microbatches by reshape": Case(
        "batch_gathered", _microbatches(constrain=False), _microbatches(constrain=True)
    ),
    "rows at sharded indices": Case("table_gathered", _rows(of_shards=False), _rows(of_shards=True)),
    "a pipeline's shift": Case(None, _pipeline),
    "halos of a convolution": Case(None, _convolution),
    "ring attention": Case(None, _ring),
    "the likeliest token": Case(None, _of_one(lambda h, w: jnp.argmax(h @ w, -1), *_HEAD)),
    "cross-entropy over shards": Case(None, _of_one(_cross_entropy, *_HEAD, ((64,), (), _I))),
    "a roll": Case(None, _of_one(lambda a: jnp.roll(a, 1, 0) + a, ((4096, 512), ("x",), _F), out=("x",))),
    "a transpose": Case(None, _of_one(lambda a: a.T * 2, ((4096, 4096), ("x",), _F), out=("x",))),
    "a batch norm": Case(
        None,
        _of_one(
            lambda x, w: ((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)) @ w,
            ((1024, 512), ("x",), _F),
            ((512, 512), (), _F),
            out=("x",),
        ),
    ),
    "a batch on every device": Case("computed_repeatedly", _replicated_batch(), _replicated_batch("data")),
    "rotary halves of split heads": Case(
        "activation_resharded", _rotated(None, None, None, "tensor"), _rotated(None, None, "tensor")
    ),
    "nucleus sampling": Case(
        "gathered_for_one_operation", _nucleus(constrain=False), _nucleus(constrain=True)
    ),
    "float32 weights gathered": Case(
        "widened", _wide_weights(cast_first=False), _wide_weights(cast_first=True)
    ),
    "moments on every device": Case("replicated_optimizer_state", _adam(), _adam("data")),
    "the largest so far": Case(
        "gathered_for_one_operation", _largest_so_far(of_shards=False), _largest_so_far(of_shards=True)
    ),
    "a tied head split by width": Case(
        "partial_results_summed", _tied_head(None, "tensor"), _tied_head("tensor", None)
    ),
    "exchanges of heads": Case(None, _ulysses),
    "a layer norm of a split width": Case(
        None, _of_one(_layer_norm, ((256, 1024), (None, "x"), _F), ((1024, 256), ("x",), _F))
    ),
    "a masked mean": Case(
        None,
        _of_one(
            jax.grad(_masked_mean),
            ((512, 512), (), _F),
            ((1024, 512), ("x",), _F),
            ((1024,), ("x",), _F),
        ),
    ),
    "a flip": Case(None, _of_one(lambda a: a[::-1] * 2, ((4096, 512), ("x",), _F), out=("x",))),
    "counts of split numbers": Case(
        None, _of_one(lambda i: jnp.bincount(i, length=1024), ((65536,), ("x",), _I))
    ),
    "a look-up in a split table": Case(
        None, _of_one(lambda t, i: t[i], ((32768, 512), ("x",), _F), ((64, 128), (), _I))
    ),
    "weights returned whole": Case("returned_whole", _returned(whole=True), _returned(whole=False)),
    "experts' rows sent back too early": Case(
        "moved_there_and_back", _experts_by_groups("expert"), _experts_by_groups(None, "expert")
    ),
    "a print in a loop": Case("host", _printing(prints=True), _printing(prints=False)),
    "a causal convolution": Case(None, _causal_convolution),
    "stages in one array": Case(None, _stages_in_one_array),
    "a state along another dimension": Case(
        "weight_resharded", _state_along(None, "fsdp"), _state_along("fsdp")
    ),
    "logits returned whole": Case("returned_whole", _evaluation(whole=True), _evaluation(whole=False)),
    "matrices orthogonalised by rows": Case(
        "activation_resharded", _orthogonalised(whole=False), _orthogonalised(whole=True)
    ),
    "a contrastive loss": Case(None, _contrastive),
    "int8 weights dequantised before their gather": Case(
        "widened", _dequantised(first=True), _dequantised(first=False)
    ),
    "a cast to fp8 after the gather": Case(
        "widened", _scaled_to_fp8(first=False), _scaled_to_fp8(first=True)
    ),
    "eigenvalues of matrices split by rows": Case(
        "gathered_for_one_operation", _roots(whole=False), _roots(whole=True)
    ),
    "a stack gathered before its loop": Case(
        "stack_gathered", _stack_in_a_loop(before=True), _stack_in_a_loop(before=False)
    ),
    "moments sharded, weights whole": Case(None, _sharded_moments),
    "messages of a graph": Case("added_by_index", _messages(by_features=False), _messages(by_features=True)),
    "the likeliest tokens in a loop": Case(None, _likeliest_in_a_loop),
    "a low-rank update split by rank": Case(
        "partial_results_summed",
        _low_rank((None, "tensor"), ("tensor",)),
        _low_rank((), (None, "tensor")),
    ),
    "indices that count the batch": Case(
        "batch_indexed", _rows_of_sequences(counted=True), _rows_of_sequences(counted=False)
    ),
    "a batch shuffled in the step": Case("batch_shuffled", _shuffled(whole=True), _shuffled(whole=False)),
    "weights in one long array": Case("weight_resharded", _all_in_one(flat=True), _all_in_one(flat=False)),
    "prefixes of a split width": Case(
        "activation_resharded", _prefixes("data", "tensor"), _prefixes(("data", "tensor"))
    ),
    "beams and sequences in one dimension": Case("table_gathered", _beams(apart=False), _beams(apart=True)),
    "rows of several tables": Case("summed_repeatedly", _codebooks(apart=True), _codebooks(apart=False)),
    "heads split by their elements": Case(
        "partial_results_summed", _head_elements(None, "tensor"), _head_elements("tensor")
    ),
    "positions written into a split cache": Case(
        "gathered_for_one_operation", _written_at(None, "x", None), _written_at(None, None, "x")
    ),
    "a split queue of negatives": Case("gathered_for_one_operation", _negatives("data"), _negatives()),
    "features of a table on every device": Case("table_summed", _features),
    "a mean over split positions": Case(None, _mean_over_positions),
    "a dense layer after split rows": Case(None, _dense_after_rows),
}
# Programs with several findings: the first is the cause of the others.
SEVERAL: dict[str, Case] = {
    "heads that devices do not divide": Case("activation_resharded", _heads(12), _heads(16)),
    "a loop over a split batch": Case(
        "batch_gathered", _rows_one_by_one(mapped=True), _rows_one_by_one(mapped=False)
    ),
    "a split cache gathered": Case(
        "weight_gathered_for_few_tokens", _split_cache(whole=True), _split_cache(whole=False)
    ),
    "weights of all experts": Case(
        "weight_gathered_for_few_tokens", _all_experts(gathered=True), _all_experts(gathered=False)
    ),
    "both matmuls by columns, on two axes": Case(
        "contraction_gathered", _two_axes(None, "tensor"), _two_axes("tensor")
    ),
    "a recurrence over split positions": Case(
        "stack_gathered", _recurrence(None, "data"), _recurrence("data")
    ),
}
