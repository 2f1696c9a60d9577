"""Programs that compute, hold or send more than they need, each with the remedy.

Cases are as in foreign_cases.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from tests.audit.foreign_cases import Case, array, constrained, mesh


def _numbers_within(chosen: Any) -> Any:
    """The number of each token among those of its expert; chosen: one-hot experts, a row for each token."""
    return (jnp.cumsum(chosen, 0) * chosen).sum(-1) - 1


def _experts(*, room_of_all: bool) -> Callable[[], Any]:
    """Tokens exchanged with experts in buffers with room for the tokens of one device, or of all."""

    def run() -> Any:
        m = mesh("expert")

        def local(x: Any, router: Any, w: Any) -> Any:
            expert = jnp.argmax(x @ router, -1)
            room = x.shape[0] * (8 if room_of_all else 1) * 2 // 16
            at = _numbers_within(jax.nn.one_hot(expert, 16, dtype=jnp.int32))
            buffer = jnp.zeros((16, room, x.shape[1]), x.dtype).at[expert, at].set(x, mode="drop")
            buffer = lax.all_to_all(buffer, "expert", 0, 1, tiled=True)
            out = lax.all_to_all(jnp.einsum("ecd,edf->ecf", buffer, w), "expert", 1, 0, tiled=True)
            return out.at[expert, at].get(mode="fill", fill_value=0)

        split = P("expert")
        mapped = jax.shard_map(local, mesh=m, in_specs=(split, P(), split), out_specs=split)
        args = array(m, (8192, 64), "expert"), array(m, (64, 16)), array(m, (16, 64, 64), "expert")
        return jax.jit(mapped), args

    return run


def _decoder(*, cached: bool) -> Callable[[], Any]:
    """Tokens generated one by one, with keys of an encoder's output that are computed once or each time."""

    def run() -> Any:
        m = mesh("data")

        def forward(w: Any, encoded: Any, x: Any) -> Any:
            keys = jnp.einsum("bsd,ldk->lbsk", encoded, w)

            def token(_: Any, x: Any) -> Any:
                def layer(x: Any, of_layer: Any) -> Any:
                    w, known = of_layer
                    k = known if cached else jnp.einsum("bsd,dk->bsk", encoded, w)
                    return jnp.einsum("bs,bsk->bk", jax.nn.softmax(jnp.einsum("bk,bsk->bs", x, k)), k), None

                return lax.scan(layer, x, (w, keys))[0]

            return lax.fori_loop(0, 16, token, x)

        args = array(m, (4, 64, 64)), array(m, (16, 256, 64), "data"), array(m, (16, 64), "data")
        return jax.jit(forward), args

    return run


def _adapters(*, merged: bool) -> Callable[[], Any]:
    """Gradients of low-rank adapters that are added to a frozen weight, or multiplied one after another."""

    def run() -> Any:
        m = mesh("data")

        def loss(adapter: Any, w: Any, x: Any) -> Any:
            a, b = adapter
            y = x @ (w + 2.0 * (a @ b)) if merged else x @ w + 2.0 * ((x @ a) @ b)
            return jnp.mean(jnp.tanh(y) ** 2)

        adapter = array(m, (512, 8)), array(m, (8, 512))
        return jax.jit(jax.grad(loss)), (adapter, array(m, (512, 512)), array(m, (16384, 512), "data"))

    return run


def _dispatch(*, one_hot: bool) -> Callable[[], Any]:
    """Tokens moved to experts by a product with one-hot numbers, or by index."""

    def run() -> Any:
        m = mesh("data")

        def group(x: Any, expert: Any, w: Any) -> Any:
            room = x.shape[0] // 4
            chosen = jax.nn.one_hot(expert, 8)
            at = _numbers_within(chosen).astype(jnp.int32)
            if one_hot:
                to = chosen[:, :, None] * jax.nn.one_hot(at, room)[:, None, :]
                out = jax.nn.relu(jnp.einsum("ecd,edf->ecf", jnp.einsum("nec,nd->ecd", to, x), w))
                return jnp.einsum("nec,ecf->nf", to, out)
            rows = jnp.zeros((8, room, x.shape[1])).at[expert, at].set(x, mode="drop")
            out = jax.nn.relu(jnp.einsum("ecd,edf->ecf", rows, w))
            return out.at[expert, at].get(mode="fill", fill_value=0)

        def forward(x: Any, expert: Any, w: Any) -> Any:
            return constrained(m, jax.vmap(group, (0, 0, None))(x, expert, w), "data")

        args = array(m, (8, 1024, 64), "data"), array(m, (8, 1024), "data", dtype=jnp.int32)
        return jax.jit(forward), (*args, array(m, (8, 64, 64)))

    return run


def _scores(*, kept: bool) -> Callable[[], Any]:
    """Attention whose scores are kept in each layer for the backward pass, over 100 GB."""

    def run() -> Any:
        m = mesh("data")

        def layer(x: Any, w: Any) -> Any:
            p = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x @ w, x))
            return jnp.tanh(jnp.einsum("bts,bsd->btd", p, x)), None

        body = layer if kept else jax.checkpoint(layer)

        def loss(w: Any, x: Any) -> Any:
            return jnp.mean(lax.scan(body, x, w)[0] ** 2)

        return jax.jit(jax.grad(loss)), (array(m, (64, 64, 64)), array(m, (16, 16384, 64), "data"))

    return run


def _crop(*spec: Any) -> Callable[[], Any]:
    """A part of each image at a computed row, of images that are split by rows or by the batch."""

    def run() -> Any:
        m = mesh("x")

        def step(x: Any, at: Any) -> Any:
            part = lax.dynamic_slice_in_dim(x, at, 192, 1)
            return jnp.tanh(constrained(m, part, *spec)).sum((1, 2))

        return jax.jit(step), (array(m, (8, 256, 64), *spec), array(m, (), dtype=jnp.int32))

    return run


def _routed(*, exchanged: bool) -> Callable[[], Any]:
    """Rows of all devices gathered on each device for its expert, or sent to the devices of their experts."""

    def run() -> Any:
        m = mesh("expert")

        def local(x: Any, router: Any, w: Any) -> Any:
            if exchanged:
                expert = jnp.argmax(x @ router, -1)
                at = _numbers_within(jax.nn.one_hot(expert, 8, dtype=jnp.int32))
                buffer = jnp.zeros((8, x.shape[0] // 8, x.shape[1])).at[expert, at].set(x, mode="drop")
                rows = lax.all_to_all(buffer, "expert", 0, 1, tiled=True)[0]
                out = lax.all_to_all((jax.nn.relu(rows @ w[0]))[None], "expert", 1, 0, tiled=True)
                return out.at[expert, at].get(mode="fill", fill_value=0)
            whole = lax.all_gather(x, "expert", tiled=True)
            is_other = jnp.argmax(whole @ router, -1) != lax.axis_index("expert")
            order = jnp.argsort(is_other, stable=True)[: whole.shape[0] // 8]
            out = jnp.zeros_like(whole).at[order].set(jax.nn.relu(whole[order] @ w[0]))
            return lax.psum_scatter(out, "expert", tiled=True)

        split = P("expert")
        mapped = jax.shard_map(local, mesh=m, in_specs=(split, P(), split), out_specs=split, check_vma=False)
        args = array(m, (8192, 2048), "expert"), array(m, (2048, 8)), array(m, (8, 2048, 2048), "expert")
        return jax.jit(mapped), args

    return run


def _feed_forward(*, by_rows: bool) -> Callable[[], Any]:
    """Two matmuls. The first is split by rows, and each device cuts its summed result; or by columns."""

    def run() -> Any:
        m = mesh("tensor")

        def local(first: Any, second: Any, x: Any) -> Any:
            if by_rows:
                at = lax.axis_index("tensor")
                own = lax.dynamic_slice_in_dim(x, at * 32, 32, 1)
                h = jax.nn.relu(lax.psum(own @ first, "tensor"))
                h = lax.dynamic_slice_in_dim(h, at * 128, 128, 1)
            else:
                h = jax.nn.relu(x @ first)
            return lax.psum(h @ second, "tensor")

        of_first = P("tensor") if by_rows else P(None, "tensor")
        mapped = jax.shard_map(local, mesh=m, in_specs=(of_first, P("tensor"), P()), out_specs=P())
        args = array(m, (256, 1024), *of_first), array(m, (1024, 256), "tensor"), array(m, (512, 256))
        return jax.jit(mapped), args

    return run


def _returns(*spec: Any) -> Callable[[], Any]:
    """Discounted sums of rewards, each computed from the next one, split by time or by environments."""

    def run() -> Any:
        m = mesh("x")

        def step(rewards: Any, ends: Any) -> Any:
            def turn(after: Any, now: Any) -> Any:
                reward, end = now
                after = reward + 0.99 * after * (1 - end)
                return after, after

            start = jnp.zeros(rewards.shape[1])
            return lax.scan(turn, start, (rewards, ends), reverse=True)[1].sum(0)

        both = array(m, (512, 256), *spec)
        return jax.jit(step), (both, both)

    return run


WORK = {
    "a crop along a split dimension": Case("gathered_for_one_operation", _crop(None, "x"), _crop("x")),
    "rows of all devices for each expert": Case(
        "gathered_for_a_part", _routed(exchanged=False), _routed(exchanged=True)
    ),
    "a first matmul split along its sum": Case(
        "summed_whole", _feed_forward(by_rows=True), _feed_forward(by_rows=False)
    ),
    "a recurrence over split time": Case("stack_gathered", _returns("x"), _returns(None, "x")),
    "buffers of experts with room for all tokens": Case(
        "sent_from_less", _experts(room_of_all=True), _experts(room_of_all=False)
    ),
    "keys of an encoder's output for each token": Case(
        "computed_repeatedly", _decoder(cached=False), _decoder(cached=True)
    ),
    "gradients of merged adapters": Case("summed_too_early", _adapters(merged=True), _adapters(merged=False)),
    "tokens moved by one-hot numbers": Case(
        "one_hot_multiplied", _dispatch(one_hot=True), _dispatch(one_hot=False)
    ),
    "scores kept for the backward pass": Case("beyond_memory", _scores(kept=True), _scores(kept=False)),
}
