"""Cross-entropy of logits; on CPU of states, by slices of positions that make their gradients at once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard
from jax.typing import DTypeLike

from meshwright.layout.contractions import InputGroup
from meshwright.models.scopes import BACKWARD
from meshwright.nn.each_device import partitions_of
from meshwright.nn.norms import log_sum_exp
from meshwright.nn.products.contract import local_einsum
from meshwright.nn.start.device_mesh import partition_spec, platform
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import Contraction

# Target of a position that is not part of the loss.
NOT_COUNTED = -1

# (logits[B, T, V], targets) -> a loss of each target, [B, T]. Targets are [B, T], or a pytree of such arrays.
Nats = Callable[[Array, Any], Array]


class Names(NamedTuple):
    """The scopes of the product with the head's weight, and of the loss."""

    product: str
    loss: str


def nats_of(logits: Array, targets: Array, *, masked: bool, z_loss: float) -> Array:
    """logsumexp(logits) - logits[target] f32[B, T]; over a split V only [B, T] arrays are reduced.

    The target's logit is a masked sum rather than a gather, which a split V would need whole. masked: a
    target that is NOT_COUNTED has none. z_loss: weight of log(sum exp(logits))^2, which keeps the
    softmax' sum near 1 (Chowdhery et al., arXiv:2204.02311, section 5).
    """
    wide = logits.astype(jnp.float32)
    log_sum = log_sum_exp(wide)
    columns = lax.broadcasted_iota(targets.dtype, (1, 1, wide.shape[-1]), 2)
    hit = jnp.where(columns == targets[..., None], wide, 0.0)
    nats = log_sum - jnp.sum(hit, axis=-1)
    if z_loss:
        nats += z_loss * log_sum**2
    return jnp.where(targets == NOT_COUNTED, 0.0, nats) if masked else nats


def num_slices(head: InputGroup, shape: Sequence[int], num_batch_shards: int) -> int:
    """The number of slices of positions for computing the head of x[B, T, D]; 1 if all at once.

    A slice has about `Platform.head_tokens` tokens of a device.
    """
    head_tokens = platform().head_tokens
    if not head_tokens or not head.takes_slices:
        return 1
    batch, length = shape
    slices = batch // num_batch_shards * length / head_tokens
    counts = [count for count in range(1, length + 1) if length % count == 0]
    return min(counts, key=lambda count: abs(log(slices / count)))


def loss_by_slices(
    plan: Contraction,
    dtype: DTypeLike,
    x: Array,
    w: Array,
    targets: Array,
    nats: Nats,
    count: int,
    names: Names,
) -> Array:
    """The mean of the losses of targets[B, T] by the product `plan` of x[B, T, D] and w, by slices of T.

    Logits are float32. Each slice makes its gradients before the next slice's logits, so that no logits are
    kept or computed twice: the backward pass multiplies the gradients by the cotangent of one number.
    """

    slices = jax.tree.map(lambda array: _cut(array, count), targets)

    def of_slice(x: Array, targets: Array, w: Array) -> tuple[Array, Any]:
        with jax.named_scope(names.product):
            logits = local_einsum(plan, x, w.astype(dtype), jnp.float32)
        with jax.named_scope(names.loss):
            return jax.vjp(lambda logits: nats(logits, targets), logits)

    def mean(slices: Array) -> Array:
        with jax.named_scope(names.loss):
            return jnp.mean(slices)

    @jax.custom_vjp
    def loss(x: Array, w: Array) -> Array:
        def add_slice(_: None, rows: tuple[Array, Any]) -> tuple[None, Array]:
            return None, of_slice(*rows, w)[0]

        return mean(lax.scan(add_slice, None, (_cut(x, count), slices))[1])

    def forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
        def add_slice(d_w: Array, rows: tuple[Array, Any]) -> tuple[Array, tuple[Array, Array]]:
            nats_of_rows, pull_back = of_slice(*rows, w)
            with jax.named_scope(BACKWARD), jax.named_scope(names.loss):
                (d_logits,) = pull_back(jnp.full_like(nats_of_rows, 1 / (count * nats_of_rows.size)))
            with jax.named_scope(BACKWARD), jax.named_scope(names.product):
                d_logits = d_logits.astype(dtype)
                d_x = local_einsum(plan.lhs_gradient, d_logits, w.astype(dtype), dtype)
                return d_w + local_einsum(by_rows, rows[0], d_logits, jnp.float32), (nats_of_rows, d_x)

        by_rows = _states_first(plan.rhs_gradient)
        shape = x.shape[-1], w.size // x.shape[-1]
        nothing = jnp.zeros(shape, jnp.float32, out_sharding=partition_spec(by_rows.product))
        d_w, (nats_of_slices, d_x) = lax.scan(add_slice, nothing, (_cut(x, count), slices))
        with jax.named_scope(BACKWARD), jax.named_scope(names.product):
            d_w = (d_w if by_rows is plan.rhs_gradient else d_w.T).astype(w.dtype)
        return mean(nats_of_slices), (_joined(d_x), d_w)

    def backward(gradients: tuple[Array, Array], d_loss: Array) -> tuple[Array, ...]:
        with jax.named_scope(names.product):
            return tuple(_times(gradient, d_loss) for gradient in gradients)

    loss.defvjp(forward, backward)
    return loss(x, w)


def _states_first(gradient: Contraction) -> Contraction:
    """dW as [D, V], so that XLA for CPU transposes its smaller operand, the states."""
    einsum = gradient.einsum
    letters = "".join(letter for letter in einsum.lhs + einsum.rhs if letter in einsum.out)
    if letters == einsum.out:
        return gradient
    out = gradient.out
    turned = ShardedArray(out.name, tuple(letters), tuple(out.axes_of(letter) for letter in letters))
    return replace(gradient, einsum=replace(einsum, out=letters), out=turned)


def _cut(x: Array, count: int) -> Array:
    """x[B, T, ...] as [count, B, T / count, ...]."""
    batch, _, *others = partitions_of(x)
    shape = (x.shape[0], count, x.shape[1] // count, *x.shape[2:])
    split = PartitionSpec(batch, None, None, *others)
    return jnp.moveaxis(jnp.reshape(x, shape, out_sharding=split), 1, 0)


def _joined(slices: Array) -> Array:
    """[count, B, T / count, ...] as [B, T, ...]."""
    _, batch, _, *others = partitions_of(slices)
    rows = jnp.moveaxis(slices, 0, 1)
    shape = (rows.shape[0], -1, *rows.shape[3:])
    return jnp.reshape(rows, shape, out_sharding=PartitionSpec(batch, None, *others))


def _times(gradient: Array, factor: Array) -> Array:
    """The gradient, which may be a partial sum, times a number."""
    partial = jax.typeof(gradient).sharding.spec.unreduced
    return gradient * reshard(factor.astype(gradient.dtype), PartitionSpec(reduced=partial))
