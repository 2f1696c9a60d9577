"""Adafactor of weights of which a device, or a stage of a pipeline, may have a part."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from meshwright.layout.optimizers import FACTORED_FROM
from meshwright.nn.gradients import tensor_of

# Of each weight, [2]: the mean square of its update, and its own.
MeanSquares = Any
# Adafactor's constants (Shazeer & Stern, arXiv:1804.04235, section 6): the least size of a weight by which
# its update is scaled, and the size to which the update is clipped before.
_LEAST_SIZE, _CLIPPED_TO = 1e-3, 1.0


def adafactor(rate: Callable[[Any], Array]) -> optax.GradientTransformationExtraArgs:
    """w - lr max(rms(w), 0.001) u / max(1, rms(u)), with u = g / sqrt(v), v of a row and a column.

    rms: over all of a weight, so over all layers of a stack. The update takes `whole`, which makes the mean
    squares of whole weights of those of the parts that it has; by default these are whole. Each size is taken
    once, by optax.adafactor that of the weight twice; the state is the same.
    """
    return optax.chain(
        _by_rows_and_columns(),
        _by_sizes(),
        optax.scale_by_learning_rate(rate, flip_sign=False),
        optax.identity(),
        optax.scale(-1.0),
    )


def _by_rows_and_columns() -> optax.GradientTransformation:
    """u = g / sqrt(v); what is summed over devices of a weight has its name."""
    of_all = optax.scale_by_factored_rms(min_dim_size_to_factor=FACTORED_FROM)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        after = []

        def one(keys: tuple[Any, ...], gradient: Array, weight: Array, *moments: Array) -> Any:
            with jax.named_scope(tensor_of(jax.tree_util.keystr(keys, simple=True, separator="/"))):
                scaled, own = of_all.update(gradient, type(state)(state.count, *moments), weight)
            after.append(own)
            return scaled

        scaled = jax.tree_util.tree_map_with_path(one, updates, params, *state[1:])
        structure = jax.tree.structure(updates)
        count, *moments = zip(*after, strict=True)
        return scaled, type(state)(count[0], *(jax.tree.unflatten(structure, own) for own in moments))

    return optax.GradientTransformation(of_all.init, update)


def _by_sizes() -> optax.GradientTransformationExtraArgs:
    """u max(rms(w), 0.001) / max(1, rms(u))."""

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        whole: Callable[[MeanSquares], MeanSquares] | None = None,
        **_: Any,
    ) -> Any:
        own = jax.tree.map(lambda u, w: jnp.stack([_mean_square(u), _mean_square(w)]), updates, params)

        def scaled(update: Array, mean_squares: Array) -> Array:
            of_update, of_weight = jnp.sqrt(mean_squares)
            return update * jnp.maximum(of_weight, _LEAST_SIZE) / jnp.maximum(1.0, of_update / _CLIPPED_TO)

        return jax.tree.map(scaled, updates, own if whole is None else whole(own)), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _mean_square(x: Array) -> Array:
    return jnp.mean(jnp.square(x))


def mean_squares(
    optimizer: optax.GradientTransformationExtraArgs, gradients: Any, state: Any, params: Any, norm: Array
) -> MeanSquares:
    """The mean squares that an optimizer with `adafactor` takes in an update, of the weights as they are."""
    found = []

    def told(own: MeanSquares) -> MeanSquares:
        found.append(own)
        return own

    optimizer.update(gradients, state, params, norm=norm, whole=told)
    return found[0]
