"""Programs with their own collectives, kernels or partitioning rules, each wrong in one way, and the remedy.

Cases are as in foreign_cases.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.audit.foreign_cases import Case, array, constrained, mesh


def _filling_pipeline(*, each_turn: bool) -> Callable[[], Any]:
    """A pipeline whose results are summed over its stages in each turn, or once."""

    def run() -> Any:
        m, count = mesh("pipe"), 16

        def local(w: Any, xs: Any) -> Any:
            stage = lax.axis_index("pipe")

            def tick(carried: Any, t: Any) -> Any:
                given, outs = carried
                y = jnp.tanh(jnp.where(stage == 0, xs[jnp.clip(t, 0, count - 1)], given) @ w[0])
                last = jnp.where(stage == 7, y, 0)
                last = lax.psum(last, "pipe") if each_turn else last
                outs = lax.dynamic_update_index_in_dim(outs, last, jnp.clip(t - 7, 0, count - 1), 0)
                return (lax.ppermute(y, "pipe", [(i, (i + 1) % 8) for i in range(8)]), outs), None

            start = jnp.zeros_like(xs[0]), jnp.zeros_like(xs)
            outs = lax.scan(tick, start, jnp.arange(count + 7))[0][1]
            return outs if each_turn else lax.psum(outs, "pipe")

        split = jax.shard_map(local, mesh=m, in_specs=(P("pipe"), P()), out_specs=P(), check_vma=False)
        return jax.jit(split), (array(m, (8, 256, 256), "pipe"), array(m, (count, 16, 256)))

    return run


def _gradients_by_hand(*, each_turn: bool) -> Callable[[], Any]:
    """Gradients of microbatches in a shard_map, averaged over devices in each turn, or once."""

    def run() -> Any:
        m = mesh("data")

        def local(w: Any, batches: Any) -> Any:
            def add(total: Any, x: Any) -> Any:
                gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
                return total + (lax.psum(gradient, "data") / 8 if each_turn else gradient), None

            total = lax.scan(add, jnp.zeros_like(w), batches)[0]
            return total if each_turn else lax.psum(total, "data") / 8

        specs = P(), P(None, "data")
        split = jax.shard_map(local, mesh=m, in_specs=specs, out_specs=P(), check_vma=False)
        return jax.jit(split), (array(m, (512, 1024)), array(m, (8, 1024, 512), None, "data"))

    return run


def _reciprocals() -> Any:
    """Reciprocals of sums over devices, added up in a loop: the sums cannot be left until after it."""
    m = mesh("data")

    def local(batches: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            return total + 1.0 / lax.psum(x, "data"), None

        return lax.scan(add, jnp.zeros_like(batches[0]), batches)[0]

    split = jax.shard_map(local, mesh=m, in_specs=P(None, "data"), out_specs=P(), check_vma=False)
    return jax.jit(split), (array(m, (8, 1024, 512), None, "data"),)


def _averaged(*, twice: bool) -> Callable[[], Any]:
    """Gradients averaged over devices, and clipped; their average taken again, or not."""

    def run() -> Any:
        m = mesh("data")

        def local(w: Any, x: Any) -> Any:
            gradient = lax.pmean(jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), "data")
            gradient /= jnp.maximum(1.0, jnp.linalg.norm(gradient))
            return w - 0.1 * (lax.pmean(gradient, "data") if twice else gradient)

        split = jax.shard_map(local, mesh=m, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
        return jax.jit(split), (array(m, (512, 512)), array(m, (1024, 512), "data"))

    return run


def _one_number_per_row(*spec: str) -> Callable[[], Any]:
    """A number of each row by a loop in a shard_map, which takes its rows as `spec` says."""

    def run() -> Any:
        m = mesh("data")

        def local(x: Any) -> Any:
            return lax.fori_loop(0, 8, lambda _, h: jnp.tanh(h + x), x).sum(-1)

        rows = jax.shard_map(local, mesh=m, in_specs=P(*spec), out_specs=P(*spec), check_vma=False)
        forward = lambda x: constrained(m, rows(x), "data") * 2  # noqa: E731
        return jax.jit(forward), (array(m, (4096, 512), "data"),)

    return run


def _broadcast_weights() -> Any:
    """Weights that the first device sends to all before each step."""
    m = mesh("data")

    def local(w: Any, x: Any) -> Any:
        w = lax.psum(jnp.where(lax.axis_index("data") == 0, w, 0), "data")
        return w - 0.1 * lax.pmean(jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), "data")

    split = jax.shard_map(local, mesh=m, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    return jax.jit(split, donate_argnums=0), (array(m, (512, 512)), array(m, (1024, 512), "data"))


def _own_rows(*spec: str) -> Callable[[], Any]:
    """A gradient in a shard_map that takes the batch as `spec` says; if whole, each device cuts its rows."""

    def run() -> Any:
        m = mesh("data")

        def local(w: Any, x: Any) -> Any:
            x = x if spec else lax.dynamic_slice_in_dim(x, lax.axis_index("data") * 128, 128)
            return lax.pmean(jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), "data")

        split = jax.shard_map(local, mesh=m, in_specs=(P(), P(*spec)), out_specs=P(), check_vma=False)
        return jax.jit(split), (array(m, (512, 512)), array(m, (1024, 512), "data"))

    return run


def _wide_ring(*, wide: bool) -> Callable[[], Any]:
    """A ring of keys in bfloat16, upcast before it or in each turn."""

    def run() -> Any:
        m = mesh("context")

        def local(q: Any, k: Any) -> Any:
            def turn(carried: Any, _: None) -> Any:
                k, out = carried
                out += jnp.tanh(q.astype(jnp.float32) @ k.astype(jnp.float32).T) @ k.astype(jnp.float32)
                return (lax.ppermute(k, "context", [(i, (i + 1) % 8) for i in range(8)]), out), None

            start = k.astype(jnp.float32) if wide else k, jnp.zeros(q.shape, jnp.float32)
            return lax.scan(turn, start, None, length=8)[0][1]

        split = P("context")
        run = jax.shard_map(local, mesh=m, in_specs=split, out_specs=split, check_vma=False)
        rows = array(m, (4096, 128), "context", dtype=jnp.bfloat16)
        return jax.jit(run), (rows, rows)

    return run


def _loss_by_hand(*, gathered: bool) -> Callable[[], Any]:
    """A cross-entropy in a shard_map, of gathered logits or of their shards' maxima and sums."""

    def run() -> Any:
        m = mesh("x")

        def local(h: Any, w: Any, targets: Any) -> Any:
            logits = h @ w
            if gathered:
                logits = lax.all_gather(logits, "x", axis=1, tiled=True)
                hit = jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
                return jnp.mean(jax.nn.logsumexp(logits, -1) - hit)
            peak = lax.pmax(jnp.max(logits, -1), "x")
            total = lax.psum(jnp.sum(jnp.exp(logits - peak[:, None]), -1), "x")
            columns = lax.axis_index("x") * w.shape[1] + lax.iota(jnp.int32, w.shape[1])
            hit = jnp.sum(jnp.where(columns == targets[:, None], logits, 0.0), -1)
            return jnp.mean(peak + jnp.log(total) - lax.psum(hit, "x"))

        specs = P(), P(None, "x"), P()
        split = jax.shard_map(local, mesh=m, in_specs=specs, out_specs=P(), check_vma=False)
        return jax.jit(split), (
            array(m, (64, 512)),
            array(m, (512, 32768), None, "x"),
            array(m, (64,), dtype=jnp.int32),
        )

    return run


def _in_a_shard_map(*spec: str) -> Callable[[], Any]:
    """A recurrence of each row in a shard_map that takes its rows as `spec` says."""

    def run() -> Any:
        m = mesh("data")

        def local(x: Any) -> Any:
            return lax.fori_loop(0, 8, lambda _, h: jnp.tanh(h + x), x)

        rows = jax.shard_map(local, mesh=m, in_specs=P(*spec), out_specs=P(*spec), check_vma=False)

        def forward(w: Any, x: Any) -> Any:
            return constrained(m, constrained(m, rows(x), "data") @ w, "data")

        return jax.jit(forward), (array(m, (512, 512)), array(m, (4096, 512), "data"))

    return run


def _kernel(*, split: bool) -> Callable[[], Any]:
    """A Pallas kernel over rows, within a shard_map or called on a split array."""

    def run() -> Any:
        m, block = mesh("data"), pl.BlockSpec((64, 512), lambda i: (i, 0))

        def double(x: Any, y: Any) -> None:
            y[...] = 2 * x[...]

        def doubled(x: Any) -> Any:
            call = pl.pallas_call(
                double,
                grid=(x.shape[0] // 64,),
                in_specs=[block],
                out_specs=block,
                out_shape=x,
                interpret=True,
            )
            return call(x)

        by_rows = jax.shard_map(doubled, mesh=m, in_specs=P("data"), out_specs=P("data"), check_vma=False)

        def forward(w: Any, x: Any) -> Any:
            return constrained(m, (by_rows if split else doubled)(x @ w), "data")

        return jax.jit(forward), (array(m, (512, 512)), array(m, (2048, 512), "data"))

    return run


def _flattened(*, flat: bool) -> Callable[[], Any]:
    """A product of [B, T, D] with T split, which is flattened to [B T, D] or not."""

    def run() -> Any:
        m = mesh("x")

        def forward(w: Any, x: Any) -> Any:
            if not flat:
                return jnp.einsum("btd,df->btf", x, w)
            rows = constrained(m, jnp.reshape(x, (-1, 512)), "x") @ w
            return constrained(m, jnp.reshape(rows, (*x.shape[:2], 512)), None, "x")

        return jax.jit(forward), (array(m, (512, 512)), array(m, (4, 2048, 512), None, "x"))

    return run


def _dispatched(*, exchanged: bool) -> Callable[[], Any]:
    """Experts' products of dispatched rows [G, E, C, D], whose groups G or experts E are split."""

    def run() -> Any:
        m = mesh("data")

        def forward(w: Any, rows: Any) -> Any:
            rows = constrained(m, rows, None, "data") if exchanged else rows
            out = constrained(
                m, jnp.einsum("gecd,edf->gecf", rows, w), *((None, "data") if exchanged else ("data",))
            )
            return constrained(m, out, "data")

        return jax.jit(forward), (array(m, (8, 512, 2048), "data"), array(m, (8, 8, 32, 512), "data"))

    return run


def _own_rule(*, whole: bool) -> Callable[[], Any]:
    """An activation with a rule for its partitioning of its own, which asks for whole rows or does not."""

    def run() -> Any:
        m = mesh("x")

        @custom_partitioning
        def squared(x: Any) -> Any:
            return x * jnp.tanh(x)

        def rule(given: Any) -> NamedSharding:
            return NamedSharding(given[0].sharding.mesh, P() if whole else P(None, "x"))

        squared.def_partition(
            infer_sharding_from_operands=lambda mesh, given, result: rule(given),
            partition=lambda mesh, given, result: (
                mesh,
                lambda x: x * jnp.tanh(x),
                rule(given),
                (rule(given),),
            ),
            sharding_rule="i j -> i j",
            need_replication_factors=("j",) if whole else (),
        )

        def forward(first: Any, second: Any, x: Any) -> Any:
            return constrained(m, squared(constrained(m, x @ first, None, "x")) @ second)

        pair = array(m, (512, 2048), None, "x"), array(m, (2048, 512), "x")
        return jax.jit(forward), (*pair, array(m, (1024, 512)))

    return run


def _distilled(*, whole: bool) -> Callable[[], Any]:
    """The gradient of a student's distance from its teacher, whose rows are whole or not."""

    def run() -> Any:
        m = mesh("data")

        def loss(student: Any, teacher: Any, x: Any) -> Any:
            taught = jnp.tanh((constrained(m, x) if whole else x) @ teacher[0]) @ teacher[1]
            return jnp.mean((jnp.tanh(x @ student[0]) @ student[1] - taught) ** 2)

        pairs = [(array(m, (512, width)), array(m, (width, 512))) for width in (512, 2048)]
        return jax.jit(jax.grad(loss)), (*pairs, array(m, (2048, 512), "data"))

    return run


def _few_rows(*spec: str | None) -> Callable[[], Any]:
    """The sums of exponents of few rows by a head that is stored by `spec`."""

    def run() -> Any:
        m = mesh("x")

        def forward(h: Any, w: Any) -> Any:
            h = constrained(m, h, None, "x" if spec[0] else None)
            return jax.nn.logsumexp(h @ w, -1)

        return jax.jit(forward), (array(m, (512, 512)), array(m, (512, 32768), *spec))

    return run


def _recurrent_state(*spec: str | None) -> Callable[[], Any]:
    """A step of a recurrence, whose donated state is stored by `spec`."""

    def run() -> Any:
        m = mesh("x")

        def forward(state: Any, x: Any) -> Any:
            state = 0.9 * state + x[..., None]
            return state, jnp.sum(state, -1)

        state = array(m, (64, 1024, 16), *spec)
        jitted = jax.jit(forward, donate_argnums=0, out_shardings=(state.sharding, None))
        return jitted, (state, array(m, (64, 1024), *spec))

    return run


BY_HAND = {
    "a pipeline that sums its results in each turn": Case(
        "summed_repeatedly", _filling_pipeline(each_turn=True), _filling_pipeline(each_turn=False)
    ),
    "gradients summed in each turn by hand": Case(
        "summed_repeatedly", _gradients_by_hand(each_turn=True), _gradients_by_hand(each_turn=False)
    ),
    "reciprocals of sums in each turn": Case(None, _reciprocals),
    "gradients averaged twice": Case("sent_although_equal", _averaged(twice=True), _averaged(twice=False)),
    "a shard_map of whole rows to one number each": Case(
        "computed_repeatedly", _one_number_per_row(), _one_number_per_row("data")
    ),
    "a batch whole in a shard_map that cuts it": Case("computed_repeatedly", _own_rows(), _own_rows("data")),
    "weights of the first device": Case(None, _broadcast_weights),
    "a ring of upcast keys": Case("widened", _wide_ring(wide=True), _wide_ring(wide=False)),
    "a loss of logits gathered by hand": Case(
        "gathered_for_one_operation", _loss_by_hand(gathered=True), _loss_by_hand(gathered=False)
    ),
    "a shard_map of whole rows": Case("computed_repeatedly", _in_a_shard_map(), _in_a_shard_map("data")),
    "a kernel outside of a shard_map": Case(
        "activation_resharded", _kernel(split=False), _kernel(split=True)
    ),
    "flattened positions": Case("activation_resharded", _flattened(flat=True), _flattened(flat=False)),
    "weights gathered for their experts' rows": Case(
        "weight_gathered_for_few_tokens", _dispatched(exchanged=False), _dispatched(exchanged=True)
    ),
    "a rule that asks for whole rows": Case(
        "contraction_gathered", _own_rule(whole=True), _own_rule(whole=False)
    ),
    "a batch made whole for a teacher": Case(
        "contraction_gathered", _distilled(whole=True), _distilled(whole=False)
    ),
    "few rows by a head split by its width": Case(
        "partial_results_summed", _few_rows("x", None), _few_rows(None, "x")
    ),
    "a recurrent state on every device": Case(
        "replicated_cache", _recurrent_state(None, None), _recurrent_state(None, "x")
    ),
}
