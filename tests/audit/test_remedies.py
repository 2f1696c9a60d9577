"""Each remedy for repeated matmuls and for one-hot numbers, applied: the finding is gone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tests.audit.foreign_cases import array, constrained, mesh
from tests.audit.foreign_given import grid

import meshwright


class Remedy(NamedTuple):
    """A program, a part of its remedy, and the program with the remedy; kind: of the finding."""

    run: Callable[[], Any]
    change: str
    fixed: Callable[[], Any]
    kind: str = "computed_repeatedly"


def _by_hand(*, split: bool) -> Callable[[], Any]:
    """Weights that a shard_map takes whole over an axis, or a column-wise and a row-wise part of each."""

    def run() -> Any:
        m = grid("data", "tensor")
        first, second = (P(None, "tensor"), P("tensor")) if split else (P(), P())

        def local(x: Any, w: Any, v: Any) -> Any:
            y = jnp.tanh(x @ w) @ v
            return lax.psum(y, "tensor") if split else y

        mapped = jax.shard_map(
            local, mesh=m, in_specs=(P("data"), first, second), out_specs=P("data"), check_vma=False
        )
        args = array(m, (512, 256), "data"), array(m, (256, 1024), *first), array(m, (1024, 256), *second)
        return jax.jit(mapped), args

    return run


def _batch(*spec: Any) -> Callable[[], Any]:
    """A batch that is given whole, or in parts."""

    def run() -> Any:
        m = mesh("data")
        args = array(m, (256, 256)), array(m, (1024, 256), *spec)
        return jax.jit(lambda w, x: jnp.tanh(x @ w)), args

    return run


def _sorted(*, own: bool) -> Callable[[], Any]:
    """Rows sorted by expert over all devices, or by each device."""

    def run() -> Any:
        m = mesh("data")

        def forward(x: Any, keys: Any, w: Any) -> Any:
            return jnp.tanh(x[jnp.argsort(keys)] @ w)

        mapped = jax.shard_map(forward, mesh=m, in_specs=(P("data"), P("data"), P()), out_specs=P("data"))
        args = array(m, (4096, 256), "data"), array(m, (4096,), "data"), array(m, (256, 2048))
        return jax.jit(mapped if own else forward), args

    return run


def _fsdp(*batch: Any) -> Callable[[], Any]:
    """FSDP whose batch is split over another axis alone, or over both."""

    def run() -> Any:
        m = grid("data", "fsdp")

        def loss(w: Any, x: Any) -> Any:
            for each in w:
                x = jnp.tanh(x @ constrained(m, each))
            return jnp.mean(x**2)

        args = (array(m, (256, 256), "fsdp"),) * 2, array(m, (4096, 256), batch)
        return jax.jit(jax.grad(loss)), args

    return run


def _logits(*spec: Any) -> Callable[[], Any]:
    """Logits constrained to be whole, or to be split along the vocabulary."""

    def run() -> Any:
        m = grid("data", "tensor")

        def loss(w: Any, v: Any, head: Any, h: Any, labels: Any) -> Any:
            logits = constrained(m, (jnp.tanh(h @ w) @ v) @ head, "data", *spec)
            at = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
            return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.where(at, logits, 0).sum(-1))

        weights = array(m, (256, 4096), None, "tensor"), array(m, (4096, 256), "tensor")
        args = *weights, array(m, (256, 4096), None, "tensor"), array(m, (4096, 256), "data")
        return jax.jit(loss), (*args, array(m, (4096,), "data", dtype=jnp.int32))

    return run


def _output(*spec: Any) -> Callable[[], Any]:
    """An output projection that is whole, or split by its rows, after split columns."""

    def run() -> Any:
        m = mesh("tensor")

        def forward(x: Any, w: Any, v: Any) -> Any:
            return jnp.tanh(x @ w) @ v

        args = array(m, (512, 2048)), array(m, (2048, 8192), None, "tensor"), array(m, (8192, 8192), *spec)
        return jax.jit(forward), args

    return run


def _head(*spec: Any) -> Callable[[], Any]:
    """A head that is whole, or split along the vocabulary, next to split weights."""

    def run() -> Any:
        m = mesh("tensor")

        def forward(x: Any, w: Any, v: Any, head: Any) -> Any:
            return jnp.argmax((jnp.tanh(x @ w) @ v) @ head, -1)

        weights = array(m, (256, 4096), None, "tensor"), array(m, (4096, 256), "tensor")
        return jax.jit(forward), (array(m, (512, 256)), *weights, array(m, (256, 4096), *spec))

    return run


def _experts(*, by_index: bool) -> Callable[[], Any]:
    """Rows sent to experts by a product with one-hot numbers that are gathered, or by index."""

    def run() -> Any:
        m = mesh("expert")

        def local(x: Any, chosen: Any, w: Any) -> Any:
            if by_index:
                rows = jnp.zeros((8, 64, x.shape[1]), x.dtype)
                at = jnp.cumsum(jax.nn.one_hot(chosen, 8, dtype=jnp.int32), 0)
                at = jnp.take_along_axis(at, chosen[:, None], 1)[:, 0] - 1
                rows = rows.at[chosen, at].set(x, mode="drop")
                rows = lax.all_to_all(rows, "expert", 0, 1, tiled=True)
                return jnp.tanh(rows[0] @ w[0])
            hot = lax.all_gather(jax.nn.one_hot(chosen, 256), "expert", tiled=True)
            return jnp.tanh(hot @ w[0])

        split = P("expert")
        mapped = jax.shard_map(local, mesh=m, in_specs=(split, split, split), out_specs=split)
        args = array(m, (512, 256), "expert"), array(m, (512,), "expert", dtype=jnp.int32)
        return jax.jit(mapped), (*args, array(m, (8, 256, 256), "expert"))

    return run


REMEDIES = {
    "weights whole in a shard_map": Remedy(
        _by_hand(split=False), "in the shard_map's in_specs", _by_hand(split=True)
    ),
    "a batch given whole": Remedy(_batch(), "give the step its batch in parts", _batch("data")),
    "rows sorted over all devices": Remedy(
        _sorted(own=False), "sort and multiply each device's rows in jax.shard_map", _sorted(own=True)
    ),
    "FSDP beside data parallelism": Remedy(
        _fsdp("data"), "shard the batch over `fsdp` too", _fsdp("data", "fsdp")
    ),
    "logits that a constraint makes whole": Remedy(
        _logits(None), "constrain it to be sharded along the weight's dimension", _logits("tensor")
    ),
    "an output projection that is whole": Remedy(
        _output(), "along the dimension that the matmul sums over", _output("tensor")
    ),
    "a head that is whole": Remedy(_head(), "such as the vocabulary of a head", _head(None, "tensor")),
    "one-hot rows that are sent": Remedy(
        _experts(by_index=False), "send no one-hot numbers", _experts(by_index=True), "sent_from_less"
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_the_remedy_ends_the_finding(name: str) -> None:
    remedy = REMEDIES[name]
    before, after = (_warnings(program()) for program in (remedy.run, remedy.fixed))
    changes = [one["change"] for one in before if one["kind"] == remedy.kind]
    assert any(remedy.change in change for change in changes), before
    assert after == []


def _warnings(program: Any) -> list[dict]:
    run, args = program
    return meshwright.audit(run, *args, hardware="v5p")["warnings"]
