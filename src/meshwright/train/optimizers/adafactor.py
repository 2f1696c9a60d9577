"""Adafactor on Optax, for weights split over devices or stages."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import reshard

from meshwright.models.config import ModelConfig
from meshwright.nn.gradients import tensor_of
from meshwright.optimizers.adafactor import FACTORED_FROM
from meshwright.train.optimizers.constants import OptimizerConfig, learning_rate

# For each weight, [2]: the mean squares of its update and of itself.
MeanSquares = Any
# Adafactor's constants (Shazeer & Stern, arXiv:1804.04235, section 6): the minimum of the weight's size that
# scales its update, and the size that the update is clipped to before.
_LEAST_SIZE, _CLIPPED_TO = 1e-3, 1.0


def adafactor(config: OptimizerConfig, model: ModelConfig | None) -> optax.GradientTransformationExtraArgs:
    """Adafactor (Shazeer & Stern, arXiv:1804.04235) without momentum or decay.

        w  <- w - lr max(rms(w), 0.001) u / max(1, rms(u)),   u = g / sqrt(v)

    v: the product of a row and a column. rms: over a whole weight, so over all layers of a stack. The update
    takes `whole`, a function from the mean squares of parts of weights to the mean squares of whole weights;
    by default each part is a whole weight. optax.adafactor computes the size of a weight twice; its state is
    the same.
    """
    chain = optax.chain(
        _by_rows_and_columns(),
        _by_sizes(),
        optax.scale_by_learning_rate(learning_rate(config), flip_sign=False),
        optax.identity(),
        optax.scale(-1.0),
    )
    return optax.GradientTransformationExtraArgs(lambda params: _placed(chain, params), chain.update)


def _placed(inner: optax.GradientTransformationExtraArgs, params: optax.Params) -> Any:
    """The initial state of `inner`, with the shardings that an update gives it."""
    state = inner.init(params)
    if all(jax.typeof(leaf).sharding.mesh.empty for leaf in jax.tree.leaves(params)):
        return state
    after = jax.eval_shape(inner.update, params, state, params)[1]
    return jax.tree.map(lambda x, to: reshard(x, to.sharding.spec), state, after)


def _by_rows_and_columns() -> optax.GradientTransformation:
    """u = g / sqrt(v), with each weight's sums over devices named after it."""
    of_all = optax.scale_by_factored_rms(min_dim_size_to_factor=FACTORED_FROM)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        after = []

        def of_leaf(keys: tuple[Any, ...], gradient: Array, weight: Array, *moments: Array) -> Any:
            with jax.named_scope(tensor_of(jax.tree_util.keystr(keys, simple=True, separator="/"))):
                scaled, state_after = of_all.update(gradient, type(state)(state.count, *moments), weight)
            after.append(state_after)
            return scaled

        scaled = jax.tree_util.tree_map_with_path(of_leaf, updates, params, *state[1:])
        structure = jax.tree.structure(updates)
        count, *moments = zip(*after, strict=True)
        return scaled, type(state)(count[0], *(jax.tree.unflatten(structure, leaves) for leaves in moments))

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
        squares = jax.tree.map(lambda u, w: jnp.stack([_mean_square(u), _mean_square(w)]), updates, params)

        def scaled(update: Array, mean_squares: Array) -> Array:
            of_update, of_weight = jnp.sqrt(mean_squares)
            return update * jnp.maximum(of_weight, _LEAST_SIZE) / jnp.maximum(1.0, of_update / _CLIPPED_TO)

        return jax.tree.map(scaled, updates, squares if whole is None else whole(squares)), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _mean_square(x: Array) -> Array:
    return jnp.mean(jnp.square(x))


def mean_squares(
    optimizer: optax.GradientTransformationExtraArgs,
    gradients: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    norm: Array,
) -> MeanSquares:
    """The mean squares of an update of (parts of) weights by `adafactor`."""
    taken = []

    def keep(squares: MeanSquares) -> MeanSquares:
        taken.append(squares)
        return squares

    optimizer.update(gradients, state, params, norm=norm, whole=keep)
    return taken[0]
