"""Programs that send bytes which their devices do not need, each with the remedy.

Cases are as in foreign_cases.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from tests.audit.foreign_cases import Case, array, constrained, mesh


def _shard_map(m: Any, local: Callable[..., Any], given: Any, result: Any) -> Any:
    return jax.jit(jax.shard_map(local, mesh=m, in_specs=given, out_specs=result, check_vma=False))


def _window(*, whole: bool) -> Callable[[], Any]:
    """Sums over windows of split positions, of all gathered rows or of the neighbour's last ones."""

    def run() -> Any:
        m, width = mesh("x"), 16

        def local(x: Any) -> Any:
            count, device = x.shape[0], lax.axis_index("x")
            if whole:
                rows = jnp.pad(lax.all_gather(x, "x", tiled=True), ((width, 0), (0, 0)))
                rows = lax.dynamic_slice_in_dim(rows, device * count, count + width)
            else:
                before = lax.ppermute(x[-width:], "x", [(i, i + 1) for i in range(7)])
                rows = jnp.concatenate([before, x])
            return jnp.tanh(rows[width:] + rows[:-width])

        return _shard_map(m, local, P("x"), P("x")), (array(m, (1024, 64), "x"),)

    return run


def _neighbour(*, gathered: bool) -> Callable[[], Any]:
    """Stages that take the rows of the stage before out of a gather, or by a permute."""

    def run() -> Any:
        m = mesh("pipe")

        def local(w: Any, x: Any) -> Any:
            def tick(rows: Any, _: None) -> Any:
                rows = jnp.tanh(rows @ w[0])
                if gathered:
                    return lax.all_gather(rows, "pipe")[(lax.axis_index("pipe") - 1) % 8], None
                return lax.ppermute(rows, "pipe", [(i, (i + 1) % 8) for i in range(8)]), None

            return lax.scan(tick, x, None, length=8)[0]

        args = array(m, (8, 64, 64), "pipe"), array(m, (128, 64), "pipe")
        return _shard_map(m, local, P("pipe"), P("pipe")), args

    return run


def _ring_of_sums(*, ring: bool) -> Callable[[], Any]:
    """Gradients added up by whole arrays that are passed round a ring, or by a psum."""

    def run() -> Any:
        m = mesh("data")

        def local(w: Any, x: Any) -> Any:
            gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

            def turn(_: Any, carried: Any) -> Any:
                total, passed = carried
                passed = lax.ppermute(passed, "data", [(i, (i + 1) % 8) for i in range(8)])
                return total + passed, passed

            total = lax.fori_loop(0, 7, turn, (gradient, gradient))[0] if ring else lax.psum(gradient, "data")
            return w - 0.1 * total

        args = array(m, (64, 64)), array(m, (128, 64), "data")
        return _shard_map(m, local, (P(), P("data")), P()), args

    return run


def _results(*, gathered: bool) -> Callable[[], Any]:
    """Results for the rows of a batch, gathered at the end of a shard_map or returned in parts."""

    def run() -> Any:
        m = mesh("data")

        def local(w: Any, x: Any) -> Any:
            rows = jnp.tanh(x @ w)
            return lax.all_gather(rows, "data", tiled=True) if gathered else rows

        args = array(m, (64, 64)), array(m, (128, 64), "data")
        return _shard_map(m, local, (P(), P("data")), P() if gathered else P("data")), args

    return run


def _head_of_a_pipeline(*, each_stage: bool) -> Callable[[], Any]:
    """A pipeline whose head each stage multiplies with all rows, or with an eighth of the last one's."""

    def run() -> Any:
        m = mesh("pipe")

        def local(w: Any, head: Any, x: Any) -> Any:
            stage = lax.axis_index("pipe")

            def tick(rows: Any, _: None) -> Any:
                y = jnp.tanh(jnp.where(stage == 0, x, rows) @ w[0])
                return lax.ppermute(y, "pipe", [(i, (i + 1) % 8) for i in range(8)]), y

            rows = lax.scan(tick, jnp.zeros_like(x), None, length=8)[1][-1]
            if each_stage:
                loss = jnp.mean(jax.nn.logsumexp(rows @ head, -1))
                return lax.psum(jnp.where(stage == 7, loss, 0.0), "pipe")
            part = lax.psum_scatter(jnp.where(stage == 7, rows, 0.0), "pipe", tiled=True)
            return lax.pmean(jnp.mean(jax.nn.logsumexp(part @ head, -1)), "pipe")

        args = array(m, (8, 64, 64), "pipe"), array(m, (64, 4096)), array(m, (64, 64))
        return _shard_map(m, local, (P("pipe"), P(), P()), P()), args

    return run


def _update(*, whole: bool) -> Callable[[], Any]:
    """Adam by hand, whose moments are gathered for an update of all weights, or stay split."""

    def run() -> Any:
        m = mesh("data")

        def local(w: Any, mean: Any, square: Any, x: Any) -> Any:
            gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
            own = lambda a: lax.dynamic_slice_in_dim(a, lax.axis_index("data") * 16, 16)  # noqa: E731
            if whole:
                gradient = lax.pmean(gradient, "data")
                mean, square = (lax.all_gather(a, "data", tiled=True) for a in (mean, square))
            else:
                gradient, w = lax.psum_scatter(gradient, "data", tiled=True) / 8, own(w)
            mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient * gradient
            w -= 0.1 * mean / (jnp.sqrt(square) + 1e-8)
            if whole:
                return w, own(mean), own(square)
            return lax.all_gather(w, "data", tiled=True), mean, square

        specs = P(), P("data"), P("data"), P("data")
        state = array(m, (128, 64), "data")
        split = jax.shard_map(local, mesh=m, in_specs=specs, out_specs=specs[:3], check_vma=False)
        args = array(m, (128, 64)), state, state, array(m, (256, 128), "data")
        return jax.jit(split, donate_argnums=(0, 1, 2)), args

    return run


def _repeated_heads(*, before: bool) -> Callable[[], Any]:
    """Keys of two heads, repeated to eight before or after they are gathered over positions."""

    def run() -> Any:
        m = mesh("x")

        def repeated(k: Any) -> Any:
            return jnp.repeat(k, 4, axis=1)

        def forward(q: Any, k: Any) -> Any:
            several = constrained(m, repeated(k), "x") if before else k
            several = constrained(m, several)
            k = several if before else repeated(several)
            scores = jax.nn.softmax(jnp.einsum("tnh,snh->tns", q, k))
            return constrained(m, jnp.einsum("tns,snh->tnh", scores, k), "x")

        return jax.jit(forward), (array(m, (512, 8, 16), "x"), array(m, (512, 2, 16), "x"))

    return run


def _gathered_weights(*, kept: bool) -> Callable[[], Any]:
    """FSDP in a loop, whose gathered weights are kept for the backward pass or gathered again."""

    def run() -> Any:
        m = mesh("fsdp")

        def loss(w: Any, x: Any) -> Any:
            def layer(x: Any, w: Any) -> Any:
                return constrained(m, jnp.tanh(x @ constrained(m, w)), "fsdp"), None

            return jnp.mean(lax.scan(layer if kept else jax.checkpoint(layer), x, w)[0] ** 2)

        w = array(m, (6, 64, 64), None, "fsdp")
        step = jax.jit(
            lambda w, x: w - 0.1 * jax.grad(loss)(w, x), donate_argnums=0, out_shardings=w.sharding
        )
        return step, (w, array(m, (512, 64), "fsdp"))

    return run


def _cache(*spec: str | None) -> Callable[[], Any]:
    """A step of generation that reads a cache by heads, stored by `spec`."""

    def run() -> Any:
        m = mesh("x")

        def forward(cache: Any, new: Any, at: Any) -> Any:
            cache = lax.dynamic_update_slice(cache, new[:, None], (0, at, 0, 0))
            keys = constrained(m, cache, None, None, "x")
            scores = jax.nn.softmax(jnp.einsum("bhd,bthd->bht", new, keys))
            return cache, constrained(m, jnp.einsum("bht,bthd->bhd", scores, keys), None, "x")

        cache, new = array(m, (16, 128, 16, 8), *spec), array(m, (16, 16, 8), None, "x")
        out = cache.sharding, new.sharding
        jitted = jax.jit(forward, donate_argnums=0, out_shardings=out)
        return jitted, (cache, new, array(m, (), dtype=jnp.int32))

    return run


def _mixed_up(*, across: bool) -> Callable[[], Any]:
    """Images mixed with the batch in reverse order, across devices or within each."""

    def run() -> Any:
        m = mesh("data")

        def turned(x: Any) -> Any:
            if across:
                return x[::-1]
            parts = constrained(m, x.reshape(8, -1, x.shape[1])[:, ::-1], "data")
            return parts.reshape(x.shape)

        def loss(w: Any, x: Any) -> Any:
            return jnp.mean(jnp.tanh((0.7 * x + 0.3 * turned(x)) @ w) ** 2)

        step = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss)(w, x), donate_argnums=0)
        return step, (array(m, (64, 64)), array(m, (128, 64), "data"))

    return run


def _masked(*spec: str) -> Callable[[], Any]:
    """Scores of a split batch with a mask that is stored by `spec`."""

    def run() -> Any:
        m = mesh("data")

        def forward(mask: Any, x: Any) -> Any:
            scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x) + mask)
            return constrained(m, jnp.einsum("bts,bsd->btd", scores, x), "data")

        return jax.jit(forward), (array(m, (64, 64), *spec), array(m, (16, 64, 32), "data"))

    return run


def _resized(*spec: str | None) -> Callable[[], Any]:
    """Images resized, split by `spec`."""

    def run() -> Any:
        m = mesh("x")
        images = array(m, (16, 32, 32, 4), *spec)
        out = images.sharding
        return jax.jit(lambda x: jax.image.resize(x, (16, 64, 64, 4), "bilinear"), out_shardings=out), (
            images,
        )

    return run


def _frames(*spec: str | None) -> Callable[[], Any]:
    """Overlapping frames of signals, split by `spec`."""

    def run() -> Any:
        m = mesh("x")
        at = jnp.arange(31)[:, None] * 32 + jnp.arange(64)[None]
        return jax.jit(lambda x: jnp.abs(x[:, at])), (array(m, (16, 1024), *spec),)

    return run


def _packed(*, across: bool) -> Callable[[], Any]:
    """Valid rows packed to half of the rows, across devices or within each."""

    def run() -> Any:
        m = mesh("data")

        def packed(x: Any, valid: Any) -> Any:
            return x[jnp.nonzero(valid, size=len(valid) // 2, fill_value=0)[0]]

        split = jax.shard_map(packed, mesh=m, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        rows = array(m, (512, 64), "data"), array(m, (512,), "data", dtype=jnp.bool_)
        return jax.jit(lambda x, valid: constrained(m, (packed if across else split)(x, valid), "data")), rows

    return run


def _one_layer(*, by_hand: bool) -> Callable[[], Any]:
    """FSDP of a layer that runs six times, whose gradient is summed in each turn, or once by hand."""

    def run() -> Any:
        m = mesh("fsdp")

        def run_six_times(w: Any, x: Any) -> Any:
            return lax.fori_loop(0, 6, lambda _, x: jnp.tanh(x @ w), x)

        def loss(w: Any, x: Any) -> Any:
            if not by_hand:

                def layer(x: Any, _: None) -> Any:
                    return constrained(m, jnp.tanh(x @ w), "fsdp"), None

                return jnp.mean(lax.scan(layer, x, None, length=6)[0] ** 2)
            run = jax.shard_map(
                lambda w, x: run_six_times(lax.all_gather(w, "fsdp", tiled=True), x),
                mesh=m,
                in_specs=P("fsdp"),
                out_specs=P("fsdp"),
                check_vma=False,
            )
            return jnp.mean(run(w, x) ** 2)

        w = array(m, (64, 64), "fsdp")
        step = jax.jit(
            lambda w, x: w - 0.1 * jax.grad(loss)(w, x), donate_argnums=0, out_shardings=w.sharding
        )
        return step, (w, array(m, (512, 64), "fsdp"))

    return run


def _pairs(*, all_rows: bool) -> Callable[[], Any]:
    """A contrastive loss by hand, of all pairs on every device or of its own rows' pairs."""

    def run() -> Any:
        m = mesh("data")

        def local(x: Any, y: Any) -> Any:
            others = lax.all_gather(y, "data", tiled=True)
            rows = lax.all_gather(x, "data", tiled=True) if all_rows else x
            return lax.pmean(jnp.mean(jax.nn.logsumexp(rows @ others.T, -1)), "data")

        rows = array(m, (512, 64), "data")
        return _shard_map(m, local, P("data"), P()), (rows, rows)

    return run


def _frames_of_videos() -> Any:
    """Attention over positions, then over frames after an exchange, with a residual around both."""
    m = mesh("x")

    def attended(x: Any) -> Any:
        return jnp.einsum("...ts,...sd->...td", jax.nn.softmax(jnp.einsum("...td,...sd->...ts", x, x)), x)

    def forward(x: Any) -> Any:
        for _ in range(2):
            x = constrained(m, x + attended(x), "x")
            over_frames = constrained(m, attended(constrained(m, x.swapaxes(0, 1), "x")), "x")
            x = constrained(m, x + over_frames.swapaxes(0, 1), "x")
        return x

    return jax.jit(forward), (array(m, (16, 64, 32), "x"),)


def _convolved(*, whole: bool) -> Callable[[], Any]:
    """A causal convolution of split positions, of all gathered rows or of the neighbour's last ones."""

    def run() -> Any:
        m = mesh("x")

        def local(x: Any, kernel: Any) -> Any:
            count = x.shape[0]
            if whole:
                rows = lax.all_gather(x, "x", tiled=True)
                rows = sum((jnp.roll(rows, i, 0) * kernel[i] for i in range(4)), jnp.zeros_like(rows))
                return lax.dynamic_slice_in_dim(rows, lax.axis_index("x") * count, count)
            before = lax.ppermute(x[-3:], "x", [(i, (i + 1) % 8) for i in range(8)])
            rows = jnp.concatenate([before, x])
            return sum(rows[3 - i : 3 - i + count] * kernel[i] for i in range(4))

        args = array(m, (1024, 64), "x"), array(m, (4, 64))
        return _shard_map(m, local, (P("x"), P()), P("x")), args

    return run


def _mean_of_gradients(*, gathered: bool) -> Callable[[], Any]:
    """Gradients averaged over devices after they are gathered, or by pmean."""

    def run() -> Any:
        m = mesh("data")

        def local(w: Any, x: Any) -> Any:
            gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
            mean = lax.all_gather(gradient, "data").mean(0) if gathered else lax.pmean(gradient, "data")
            return w - 0.1 * mean

        args = array(m, (64, 64)), array(m, (128, 64), "data")
        return _shard_map(m, local, (P(), P("data")), P()), args

    return run


def _signs(*, whole: bool) -> Callable[[], Any]:
    """Lion by hand: the split momentum is gathered for an update that is cut again, or stays split."""

    def run() -> Any:
        m = mesh("fsdp")

        def local(w: Any, mean: Any, x: Any) -> Any:
            full = lax.all_gather(w, "fsdp", tiled=True)
            gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(full)
            if not whole:
                gradient = lax.psum_scatter(gradient, "fsdp", tiled=True) / 8
                return w - 0.1 * jnp.sign(0.9 * mean + 0.1 * gradient), 0.99 * mean + 0.01 * gradient
            own = lambda a: lax.dynamic_slice_in_dim(a, lax.axis_index("fsdp") * 16, 16)  # noqa: E731
            gradient, mean = lax.pmean(gradient, "fsdp"), lax.all_gather(mean, "fsdp", tiled=True)
            new = full - 0.1 * jnp.sign(0.9 * mean + 0.1 * gradient)
            return own(new), own(0.99 * mean + 0.01 * gradient)

        w = array(m, (128, 64), "fsdp")
        split, args = P("fsdp"), (w, w, array(m, (256, 128), "fsdp"))
        return _shard_map(m, local, (split, split, split), (split, split)), args

    return run


def _cropped(*spec: str | None) -> Callable[[], Any]:
    """Images cut at all edges, split by `spec`."""

    def run() -> Any:
        m = mesh("x")
        images = array(m, (16, 128, 128, 4), *spec)
        crop = lambda x: jnp.tanh(x[:, 16:112, 16:112])  # noqa: E731
        return jax.jit(crop, out_shardings=images.sharding), (images,)

    return run


def _combined(*, gathered: bool) -> Callable[[], Any]:
    """Results of an expert on each device, weighted after they are gathered or before a sum."""

    def run() -> Any:
        m = mesh("expert")

        def local(x: Any, w: Any, gates: Any) -> Any:
            rows = jnp.tanh(x @ w[0])
            if gathered:
                return jnp.einsum("etd,te->td", lax.all_gather(rows, "expert"), gates)
            return lax.psum(rows * lax.dynamic_slice_in_dim(gates, lax.axis_index("expert"), 1, 1), "expert")

        args = array(m, (128, 64)), array(m, (8, 64, 64), "expert"), array(m, (128, 8))
        return _shard_map(m, local, (P(), P("expert"), P()), P()), args

    return run


def _centred(*, ring: bool) -> Callable[[], Any]:
    """Rows less their mean over devices, by rows that are passed round a ring or by a psum."""

    def run() -> Any:
        m = mesh("data")

        def local(x: Any) -> Any:
            total, passed = x.sum(0), x
            for _ in range(7 if ring else 0):
                passed = lax.ppermute(passed, "data", [(i, (i + 1) % 8) for i in range(8)])
                total += passed.sum(0)
            return x - (total if ring else lax.psum(total, "data")) / 512

        return _shard_map(m, local, P("data"), P("data")), (array(m, (512, 64), "data"),)

    return run


def _normed(*, whole: bool) -> Callable[[], Any]:
    """A layer norm of split features, made whole before it or not, and a product with their rows."""

    def run() -> Any:
        m = mesh("x")

        def forward(w: Any, x: Any) -> Any:
            h = constrained(m, x) if whole else x
            h = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-6)
            return constrained(m, constrained(m, h, None, "x") @ w)

        return jax.jit(forward), (array(m, (512, 64), "x"), array(m, (256, 512), None, "x"))

    return run


NEEDS = {
    "a window of gathered rows": Case("gathered_for_a_part", _window(whole=True), _window(whole=False)),
    "a neighbour's rows out of a gather": Case(
        "gathered_for_a_part", _neighbour(gathered=True), _neighbour(gathered=False)
    ),
    "a sum of whole arrays round a ring": Case(
        "summed_round_a_ring", _ring_of_sums(ring=True), _ring_of_sums(ring=False)
    ),
    "results gathered by hand": Case("returned_whole", _results(gathered=True), _results(gathered=False)),
    "a head that each stage computes": Case(
        "computed_repeatedly", _head_of_a_pipeline(each_stage=True), _head_of_a_pipeline(each_stage=False)
    ),
    "moments gathered for an update of all weights": Case(
        "updated_whole", _update(whole=True), _update(whole=False)
    ),
    "heads repeated before they are sent": Case(
        "sent_from_less", _repeated_heads(before=True), _repeated_heads(before=False)
    ),
    "gathered weights kept for the backward pass": Case(
        "gathered_weights_kept", _gathered_weights(kept=True), _gathered_weights(kept=False)
    ),
    "a cache by sequences that is read by heads": Case(
        "input_resharded", _cache("x"), _cache(None, None, "x")
    ),
    "a batch mixed with itself in reverse": Case(
        "batch_shuffled", _mixed_up(across=True), _mixed_up(across=False)
    ),
    "a mask split as the batch is": Case("input_resharded", _masked("data"), _masked()),
    "images resized along split rows": Case("activation_resharded", _resized(None, "x"), _resized("x")),
    "frames of split samples": Case("activation_resharded", _frames(None, "x"), _frames("x")),
    "pairs of all rows on every device": Case(
        "contraction_gathered", _pairs(all_rows=True), _pairs(all_rows=False)
    ),
    "a layer that runs several times": Case(
        "summed_repeatedly", _one_layer(by_hand=False), _one_layer(by_hand=True)
    ),
    "a convolution of gathered rows": Case(
        "gathered_for_a_part", _convolved(whole=True), _convolved(whole=False)
    ),
    "gradients gathered for their mean": Case(
        "gathered_for_one_operation", _mean_of_gradients(gathered=True), _mean_of_gradients(gathered=False)
    ),
    "experts' rows gathered for their weighted sum": Case(
        "contraction_gathered", _combined(gathered=True), _combined(gathered=False)
    ),
    "rows round a ring for their mean": Case(
        "summed_round_a_ring", _centred(ring=True), _centred(ring=False)
    ),
    "features made whole for a norm": Case("contraction_gathered", _normed(whole=True), _normed(whole=False)),
    "split rows cut at both ends": Case("activation_resharded", _cropped(None, "x"), _cropped("x")),
    "exchanges for attention over frames": Case(None, _frames_of_videos),
}
# The first of two findings is the cause of the other.
SEVERAL_NEEDS = {
    "momentum gathered for an update that is cut again": Case(
        "updated_whole", _signs(whole=True), _signs(whole=False)
    ),
    "rows packed across devices": Case("batch_shuffled", _packed(across=True), _packed(across=False)),
}
