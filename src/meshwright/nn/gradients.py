"""Shardings of gradients: while microbatches add to them, and once summed, as the optimizer's moments.

The type of the array that is differentiated says where its gradient ends. A weight typed `reduced` over axes
has a gradient that stays a partial sum over them: every device adds up its own over the microbatches, and
`summed` reduces them once a step. ZeRO 1 and 2 keep weights whole and scatter gradients, which no type of
the weight can say: for them the shard of the weight that a device updates is differentiated instead, and
`Scattered` carries both into the layers, so that each layer's gradient is scattered where it is made.
The same holds for gradients of another type than weights (`gradients_dtype`): the shard has that type, so
gradients are summed and accumulated in it. A parameter whose gradient is zero is read past its shard, so that
no device sends zeros.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr
from jax.typing import DTypeLike

from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import Param, of_a_layer
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.each_device import spec_of
from meshwright.nn.params import build, flatten, merged_params, trained
from meshwright.nn.products.execute import SentIn, run_steps
from meshwright.nn.start.device_mesh import partition_spec, reduced_axes, resharded
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.collective import Collective, reshard
from meshwright.notation.einsum import cotangent

# The scope of work on finished gradients: the audit reads passes off names.
_SCOPE = "gradients"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scattered:
    """A whole weight with the gradient of `shard`, whose values are never read.

    letters: of one layer's weight, though both arrays may be stacked over the layers. has_gradient: as in
    `Param`.
    """

    weight: Array
    shard: Array
    letters: str = field(metadata={"static": True})
    has_gradient: bool = field(default=True, metadata={"static": True})


def summed_over(layout: Layout, letters: str) -> Axes:
    """The axes over which a weight's gradient is a partial sum. letters: of the weight.

    Each device has the gradient of its own tokens: the axes split B and T in an activation with the weight's
    letters. A norm of heads (letters H) is applied to each head, so axes that split N count as well.
    """
    heads = "N" if letters == "H" else ""
    multiplied = layout.activation("", "BT" + heads + letters)
    return tuple(
        axis
        for dim, axes in zip(multiplied.dims, multiplied.axes, strict=True)
        if dim not in letters
        for axis in axes
    )


def accumulated(layout: Layout, name: str, letters: str, *, has_gradient: bool = True) -> ShardedArray:
    """A weight's gradient as microbatches add to it."""
    if layout.schedule.microbatches == 1 or not has_gradient:
        return layout.rules.updated.weight(name, letters)
    sharded = layout.rules.gradients.weight(name, letters)
    partial = summed_over(layout, of_a_layer(letters))
    return sharded.replace(unreduced=tuple(axis for axis in partial if axis not in sharded.sharded_axes))


def differentiated(config: ModelConfig, layout: Layout, params: Mapping[str, Any]) -> Any:
    """The arrays to differentiate: trained weights, or their shards if gradients are scattered."""

    def leaf(path: str, param: Param, weight: Array) -> Array:
        gradient = _gradient(layout, path, param)
        spec = partition_spec(gradient.replace(unreduced=()), gradient.unreduced)
        return resharded(weight, spec).astype(jax_dtype(layout.precision.accumulated_dtype))

    return _mapped(config, leaf, params)


def as_used(config: ModelConfig, layout: Layout, params: Mapping[str, Any], leaves: Mapping[str, Any]) -> Any:
    """The weights as the model reads them, with gradients typed as `leaves`, from `differentiated`.

    Weights that are not trained have no leaves: they are read as they are.
    """

    def leaf(path: str, param: Param, weight: Array, differentiated: Array) -> Array | Scattered:
        is_scattered = not param.has_gradient or _is_scattered(layout, path, param.letters)
        if is_scattered or layout.precision.accumulated_dtype != layout.precision.trained_dtype:
            return Scattered(weight, differentiated, of_a_layer(param.letters), param.has_gradient)
        return differentiated

    used = _mapped(config, leaf, params, leaves)
    return merged_params(config, params, used)


def read(layout: Layout, dtype: DTypeLike, name: str, weight: Scattered) -> Array:
    """The weight in `dtype`, with its shard's gradient; a scattered gradient travels as `sent_types` says."""
    shard_dtype = weight.shard.dtype
    if not weight.has_gradient:
        return weight.weight
    if not _is_scattered(layout, name, weight.letters):
        return _retyped(weight)
    sent_in = sent_types(layout, dtype) or SentIn(dtype, dtype)
    stored = layout.weight(name, weight.letters)
    yielded = cotangent(stored).replace(unreduced=summed_over(layout, weight.letters))
    kept = reduced_axes(jax.typeof(weight.shard).sharding.spec)
    home = cotangent(layout.rules.updated.weight(name, weight.letters)).replace(unreduced=kept)

    @jax.custom_vjp
    def whole(weight: Array, shard: Array) -> Array:
        used = resharded(weight.astype(dtype), partition_spec(stored, yielded.unreduced))
        return used.astype(sent_in.wider)

    def forward(weight: Array, shard: Array) -> tuple[Array, None]:
        return whole(weight, shard), None

    def backward(_: None, d_weight: Array) -> tuple[None, Array]:
        return None, run_steps(d_weight.astype(sent_in.backward), reshard(yielded, home)).astype(shard_dtype)

    whole.defvjp(forward, backward)
    with jax.named_scope(name):
        return whole(weight.weight, weight.shard)


def _retyped(weight: Scattered) -> Array:
    """The weight, with a cotangent in the type and the sharding of its shard."""
    spec, wider = jax.typeof(weight.shard).sharding.spec, weight.weight.dtype
    wider = jnp.promote_types(wider, weight.shard.dtype)

    @jax.custom_vjp
    def whole(weight: Array, shard: Array) -> Array:
        return resharded(weight, spec).astype(wider)

    def forward(weight: Array, shard: Array) -> tuple[Array, None]:
        return whole(weight, shard), None

    shard_dtype = weight.shard.dtype
    whole.defvjp(forward, lambda _, d_weight: (None, d_weight.astype(shard_dtype)))
    return whole(weight.weight, weight.shard)


def sent_types(layout: Layout, dtype: DTypeLike) -> SentIn | None:
    """Types in which weights in `dtype` and gradients travel in training; None if both are `dtype`."""
    name = layout.precision.gradients_dtype if layout.phase == "train" else None
    return None if name is None or jax_dtype(name) == dtype else SentIn(dtype, jax_dtype(name))


def zeros(config: ModelConfig, layout: Layout, leaves: Mapping[str, Any]) -> Any:
    """Gradients of no microbatch yet."""

    def leaf(path: str, param: Param, like: Array) -> Array:
        spec = partition_spec(_gradient(layout, path, param))
        return jnp.zeros(like.shape, like.dtype, out_sharding=spec)

    return _mapped(config, leaf, leaves)


def summed(config: ModelConfig, layout: Layout, gradients: Mapping[str, Any]) -> Any:
    """The gradients of all microbatches, summed over devices and sharded as the moments."""

    def leaf(path: str, param: Param, gradient: Array) -> Array:
        partial = _gradient(layout, path, param)
        with jax.named_scope(tensor_of(path)):
            steps = reshard(partial, layout.rules.updated.weight(path, param.letters))
            return run_steps(_named(gradient, partial), steps)

    with jax.named_scope(_SCOPE):
        return _mapped(config, leaf, gradients)


def added(total: Any, more: Any) -> Any:
    """The gradients of microbatches so far, plus the gradients of one more."""

    def leaf(path: Any, before: Array, new: Array) -> Array:
        with jax.named_scope(tensor_of(keystr(path, simple=True, separator="/"))):
            return before + new

    with jax.named_scope(_SCOPE):
        return jax.tree.map_with_path(leaf, total, more)


def shards(config: ModelConfig, layout: Layout, params: Mapping[str, Any]) -> Any:
    """The part of every trained weight that a device updates."""

    def leaf(path: str, param: Param, weight: Array) -> Array:
        letters = param.letters
        steps = reshard(layout.weight(path, letters), layout.rules.updated.weight(path, letters))
        return run_steps(weight, steps)

    return _mapped(config, leaf, params)


def gathered(
    config: ModelConfig, layout: Layout, updated: Mapping[str, Any], before: Mapping[str, Any]
) -> Any:
    """The trained weights, gathered from their updated shards into the memory of `before` if it is donated.

    before: the weights before the update. Stacks are gathered layer by layer: if a stack is gathered at once,
    XLA for TPUs keeps a copy next to the donated stack (jax 0.10.2), so most weights are in memory twice. A
    stack whose layers are split over stages is gathered at once, since an index into it is a layer of one
    stage only.
    """

    def leaf(path: str, param: Param, shard: Array, weight: Array) -> Array:
        def steps(letters: str) -> list[Collective]:
            return reshard(layout.rules.updated.weight(path, letters), layout.weight(path, letters))

        letters = param.letters
        with jax.named_scope(tensor_of(path)):
            if not steps(letters) or letters == of_a_layer(letters) or spec_of(weight).partitions[0]:
                return run_steps(shard, steps(letters))
            return _gathered_by_layer(shard, weight, steps(letters[1:]))

    return _mapped(config, leaf, updated, before)


def _gathered_by_layer(shards: Array, stack: Array, steps: Sequence[Collective]) -> Array:
    """`stack`[L, ...] overwritten with `shards`[L, ...], gathered. steps: the collectives of one layer."""

    def gather(layer: Array, stack: Array) -> Array:
        weight = run_steps(lax.dynamic_index_in_dim(shards, layer, keepdims=False), steps)
        return lax.dynamic_update_index_in_dim(stack, weight, layer, 0)

    return lax.fori_loop(0, len(shards), gather, stack)


def tensor_of(path: str) -> str:
    """The plan's name for a parameter's gradient as it travels: a norm's bias travels with the norm.

    >>> tensor_of("layers/mlp_norm_bias"), tensor_of("layers/wq_bias")
    ('mlp_norm', 'wq_bias')
    """
    name = path.rpartition("/")[2]
    return name.removesuffix("_bias") if "norm" in name else name


def _named(gradient: Array, partial: ShardedArray) -> Array:
    """The gradient as an operation of its own: the compiler names a sum after its operand.

    Otherwise the operand is the loop over the microbatches, with the same name for all gradients.
    """
    spec = partition_spec(partial)
    inner = PartitionSpec(None, *spec.partitions, unreduced=spec.unreduced)
    return jnp.reshape(
        jnp.reshape(gradient, (1, *gradient.shape), out_sharding=inner), gradient.shape, out_sharding=spec
    )


def _gradient(layout: Layout, path: str, param: Param) -> ShardedArray:
    return accumulated(layout, path, param.letters, has_gradient=param.has_gradient)


def _is_scattered(layout: Layout, name: str, letters: str) -> bool:
    return accumulated(layout, name, letters).axes != layout.weight(name, letters).axes


def _mapped(config: ModelConfig, leaf: Callable[..., Any], *trees: Any) -> Any:
    """The pytree of `leaf(path, param, array, ...)` over the first tree's trained parameters."""
    flat = [flatten(tree) for tree in trees]

    def leaf_of(path: str, param: Param) -> Any:
        return leaf(path, param, *(arrays[path] for arrays in flat))

    return build(config, leaf_of, only=trained(config) & flat[0].keys())
