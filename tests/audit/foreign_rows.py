"""Programs that move or multiply rows that no device needs, each with the remedy.

Cases are as in foreign_cases.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from tests.audit.foreign_cases import Case, array, constrained, mesh


def _of_experts(local: Callable[[Any, Any, Any], Any]) -> Any:
    """A step of each device's rows, x[B_data, D], router[D, E] and w[E, D, F], with its arguments."""
    m = mesh("data")
    specs = P("data"), P(), P()
    mapped = jax.shard_map(local, mesh=m, in_specs=specs, out_specs=P("data"), check_vma=False)
    return jax.jit(mapped), (array(m, (2048, 256), "data"), array(m, (256, 8)), array(m, (8, 256, 512)))


def _updated(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step that updates weights, its first argument, by the gradients of a loss."""

    def step(w: Any, *batch: Any) -> Any:
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w, *batch))

    return step


def _experts(*, dense: bool) -> Callable[[], Any]:
    """Experts on each device that multiply all rows and mask them, or only the rows in their buffers."""

    def run() -> Any:
        count, capacity = 8, 96

        def local(x: Any, router: Any, w: Any) -> Any:
            gate, chosen = lax.top_k(jax.nn.softmax(x @ router), 2)
            if dense:
                out = jnp.zeros_like(x)
                for e in range(count):
                    kept = jnp.where(chosen == e, gate, 0).sum(-1)
                    out += jnp.tanh(jnp.tanh(x @ w[e]) @ w[e].T) * kept[:, None]
                return out
            expert, row = chosen.reshape(-1), jnp.repeat(jnp.arange(x.shape[0]), 2)
            place = jnp.cumsum(expert[:, None] == jnp.arange(count), 0)[jnp.arange(expert.size), expert] - 1
            rows = jnp.zeros((count, capacity, x.shape[1])).at[expert, place].set(x[row], mode="drop")
            made = jnp.tanh(jnp.einsum("ecd,efd->ecf", jnp.tanh(jnp.einsum("ecd,edf->ecf", rows, w)), w))
            return jnp.zeros_like(x).at[row].add(made[expert, place] * gate.reshape(-1)[:, None])

        return _of_experts(local)

    return run


def _chosen(*, dense: bool) -> Callable[[], Any]:
    """Rows of the expert that an argmax chooses: of all experts' rows, or of its own buffer."""

    def run() -> Any:
        count, capacity = 8, 64

        def local(x: Any, router: Any, w: Any) -> Any:
            chosen = jnp.argmax(x @ router, -1)
            if dense:
                out = jnp.zeros_like(x)
                for e in range(count):
                    out = jnp.where((chosen == e)[:, None], jnp.tanh(x @ w[e]) @ w[e].T, out)
                return out
            hits = chosen[:, None] == jnp.arange(count)
            place = jnp.cumsum(hits, 0)[jnp.arange(x.shape[0]), chosen] - 1
            rows = jnp.zeros((count, capacity, x.shape[1])).at[chosen, place].set(x, mode="drop")
            return jnp.einsum("ecf,edf->ecd", jnp.tanh(jnp.einsum("ecd,edf->ecf", rows, w)), w)[chosen, place]

        return _of_experts(local)

    return run


def _centred(*, by_hand: bool) -> Callable[[], Any]:
    """Rows of two layers less the mean of all devices' rows, gathered for it or reduced."""

    def run() -> Any:
        m = mesh("data")

        def local(w: Any, x: Any) -> Any:
            for each in w:
                whole = lax.all_gather(x, "data", tiled=True) if by_hand else x
                mean = whole.mean(0, keepdims=True)
                mean = mean if by_hand else lax.pmean(mean, "data")
                x = x + jnp.tanh((x - mean) @ each)
            return x

        mapped = jax.shard_map(local, mesh=m, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
        return jax.jit(mapped), ((array(m, (256, 256)),) * 2, array(m, (4096, 256), "data"))

    return run


def _last_logits(*, early: bool) -> Callable[[], Any]:
    """The probability of the likeliest next token, by logits of the last position or of all positions."""

    def run() -> Any:
        m = mesh("tensor")

        def step(w: Any, head: Any, x: Any) -> Any:
            x = x[:, -1:] if early else x
            h = jnp.tanh(x @ w[0]) @ w[1]
            return jax.nn.softmax(h @ head)[:, -1].max(-1)

        w = array(m, (256, 1024), None, "tensor"), array(m, (1024, 256), "tensor")
        return jax.jit(step), (w, array(m, (256, 4096), None, "tensor"), array(m, (8, 128, 256)))

    return run


def _one_position(*, early: bool) -> Callable[[], Any]:
    """Gradients of a score of one position of each sequence, by a head that reads all positions or one."""

    def run() -> Any:
        m = mesh("data")

        def loss(w: Any, x: Any, last: Any) -> Any:
            if early:
                x = jnp.take_along_axis(x, last[:, None, None], 1)
            score = (jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) @ w[2])[..., 0]
            return jnp.mean(score if early else jnp.take_along_axis(score, last[:, None], 1))

        w = array(m, (256, 512)), array(m, (512, 512)), array(m, (512, 1))
        rows = array(m, (64, 64, 256), "data"), array(m, (64,), "data", dtype=jnp.int32)
        return jax.jit(_updated(loss), donate_argnums=0), (w, *rows)

    return run


def _frames(*spec: Any) -> Callable[[], Any]:
    """Attention within each frame of videos, whose frames or videos are split."""

    def run() -> Any:
        m = mesh("frames")

        def step(w: Any, x: Any) -> Any:
            rows = x.reshape(-1, *x.shape[2:])
            heads = jnp.tanh(rows @ w)
            scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", heads, rows))
            return constrained(m, jnp.einsum("bts,bsd->btd", scores, rows).reshape(x.shape), *spec)

        return jax.jit(step), (array(m, (256, 256)), array(m, (8, 16, 64, 256), *spec))

    return run


def _positions(*, narrow: bool) -> Callable[[], Any]:
    """Keys of split positions made whole, upcast before or after."""

    def run() -> Any:
        m = mesh("context")

        def step(w: Any, x: Any) -> Any:
            q, k = (constrained(m, jnp.einsum("btd,dnh->btnh", x, each), None, "context") for each in w)
            k = constrained(m, k if narrow else k.astype(jnp.float32)).astype(jnp.float32)
            scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k))
            return jnp.einsum("bnts,bsnh->btnh", scores, k)

        w = array(m, (256, 4, 64), dtype=jnp.bfloat16)
        return jax.jit(step), ((w, w), array(m, (2, 1024, 256), None, "context", dtype=jnp.bfloat16))

    return run


def _heads(*, repeated: bool) -> Callable[[], Any]:
    """Keys of split positions made whole, after they are repeated for all query heads, or before."""

    def run() -> Any:
        m = mesh("context")

        def step(w: Any, x: Any) -> Any:
            q = constrained(m, jnp.einsum("btd,dnh->btnh", x, w[0]), None, "context")
            k = constrained(m, jnp.einsum("btd,dkh->btkh", x, w[1]), None, "context")
            k = constrained(m, jnp.repeat(k, 4, 2)) if repeated else jnp.repeat(constrained(m, k), 4, 2)
            scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
            return constrained(m, jnp.einsum("bnts,bsnh->btnh", scores, k), None, "context")

        w = array(m, (256, 8, 32)), array(m, (256, 2, 32))
        return jax.jit(step), (w, array(m, (2, 1024, 256), None, "context"))

    return run


def _hard_rows(*, within: bool) -> Callable[[], Any]:
    """Gradients of the rows with the largest losses: of all devices, or of each device's own rows."""

    def run() -> Any:
        m = mesh("data")

        def losses(w: Any, x: Any) -> Any:
            return jnp.sum(jnp.tanh(x @ w[0]) @ w[1], -1) ** 2

        def hardest(w: Any, x: Any) -> Any:
            chosen = lax.top_k(losses(w, x), x.shape[0] // 4)[1]
            return losses(w, x[chosen]).mean()

        def loss(w: Any, x: Any) -> Any:
            if not within:
                return hardest(w, x)

            def own(w: Any, x: Any) -> Any:
                return lax.pmean(hardest(w, x), "data")

            return jax.shard_map(own, mesh=m, in_specs=(P(), P("data")), out_specs=P())(w, x)

        w = array(m, (256, 1024)), array(m, (1024, 256))
        return jax.jit(_updated(loss), donate_argnums=0), (w, array(m, (4096, 256), "data"))

    return run


def _negatives(*, within: bool) -> Callable[[], Any]:
    """A contrastive loss whose negatives are drawn among the rows of all devices, or of each device."""

    def run() -> Any:
        m = mesh("data")

        def drawn(w: Any, x: Any, key: Any) -> Any:
            z = jnp.tanh(x @ w)
            others = z[jax.random.randint(key, (x.shape[0], 4), 0, x.shape[0])]
            return jnp.mean(jax.nn.logsumexp(jnp.einsum("bd,bnd->bn", z, others), -1) - jnp.sum(z * z, -1))

        def own(w: Any, x: Any, key: Any) -> Any:
            return lax.pmean(drawn(w, x, jax.random.fold_in(key, lax.axis_index("data"))), "data")

        def step(w: Any, x: Any, key: Any) -> Any:
            specs = P(), P("data"), P()
            loss = jax.shard_map(own, mesh=m, in_specs=specs, out_specs=P()) if within else drawn
            return w - 0.1 * jax.grad(loss)(w, x, key)

        key = jax.ShapeDtypeStruct((2,), jnp.uint32)
        return jax.jit(step, donate_argnums=0), (array(m, (256, 256)), array(m, (4096, 256), "data"), key)

    return run


def _table(*, whole: bool) -> Callable[[], Any]:
    """A step of FSDP whose table is made whole, or stays in shards, for its look-up."""

    def run() -> Any:
        m = mesh("fsdp")

        def loss(w: Any, tokens: Any) -> Any:
            table = constrained(m, w[0], None, None) if whole else w[0]
            x = constrained(m, table[tokens], "fsdp")
            return jnp.mean(constrained(m, jnp.tanh(x @ constrained(m, w[1], None, None)), "fsdp") ** 2)

        w = array(m, (16384, 256), None, "fsdp"), array(m, (256, 256), "fsdp")
        return jax.jit(_updated(loss), donate_argnums=0), (w, array(m, (64, 32), "fsdp", dtype=jnp.int32))

    return run


def _stages(*, last: bool) -> Callable[[], Any]:
    """A pipeline's loss, by the last stage's results: on all devices, or where they are."""

    def run() -> Any:
        m, count = mesh("pipe"), 16

        def local(w: Any, x: Any, y: Any) -> Any:
            device, rows = lax.axis_index("pipe"), x.reshape(count, -1, x.shape[-1])

            def turn(carry: Any, i: Any) -> Any:
                h, out = carry
                z = jnp.tanh(jnp.where(device == 0, rows[jnp.minimum(i, count - 1)], h) @ w[0])
                out = out.at[jnp.maximum(i - 7, 0)].set(z)
                return (lax.ppermute(z, "pipe", [(j, (j + 1) % 8) for j in range(8)]), out), None

            start = jnp.zeros_like(rows[0]), jnp.zeros_like(rows)
            (_, out), _ = lax.scan(turn, start, jnp.arange(count + 7))
            if not last:
                out = lax.psum(jnp.where(device == 7, out, 0), "pipe")
            loss = jnp.mean((out.reshape(x.shape) - y) ** 2)
            return lax.psum(jnp.where(device == 7, loss, 0), "pipe") if last else loss

        specs = P("pipe"), P(), P()
        mapped = jax.shard_map(local, mesh=m, in_specs=specs, out_specs=P(), check_vma=False)
        return jax.jit(mapped), (array(m, (8, 64, 64), "pipe"), array(m, (1024, 64)), array(m, (1024, 64)))

    return run


ROWS: dict[str, Case] = {
    "experts of all rows": Case("computed_and_dropped", _experts(dense=True), _experts(dense=False)),
    "experts by an argmax": Case("computed_and_dropped", _chosen(dense=True), _chosen(dense=False)),
    "means of gathered rows": Case(
        "gathered_for_one_operation", _centred(by_hand=True), _centred(by_hand=False)
    ),
    "logits of all positions": Case(
        "computed_and_dropped", _last_logits(early=False), _last_logits(early=True)
    ),
    "scores of one position": Case(
        "computed_and_dropped", _one_position(early=False), _one_position(early=True)
    ),
    "negatives of all devices": Case("batch_shuffled", _negatives(within=False), _negatives(within=True)),
    "frames in one dimension with videos": Case("batch_gathered", _frames(None, "frames"), _frames("frames")),
    "keys repeated before a gather": Case("sent_from_less", _heads(repeated=True), _heads(repeated=False)),
    "keys upcast before a gather": Case("widened", _positions(narrow=False), _positions(narrow=True)),
    "a pipeline's results on all stages": Case("summed_whole", _stages(last=False), _stages(last=True)),
}

SEVERAL_ROWS: dict[str, Case] = {
    "hard rows of all devices": Case("batch_shuffled", _hard_rows(within=False), _hard_rows(within=True)),
    "a table made whole for its look-up": Case("table_summed", _table(whole=True), _table(whole=False)),
}
