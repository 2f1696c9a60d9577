"""Muon on Optax, with iterations on whole matrices, each on one device."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import get_abstract_mesh
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from meshwright.models.config import ModelConfig
from meshwright.models.parameters import Param, parameters
from meshwright.nn.each_device import axes_of, spec_of
from meshwright.nn.gradients import tensor_of
from meshwright.notation.array import Axes
from meshwright.optimizers.muon import NEWTON_SCHULZ_STEPS, is_of_matrix, is_orthogonalised
from meshwright.train.optimizers.constants import OptimizerConfig, decay_mask, learning_rate

_BETA = 0.95
# The root mean square of an update after multiplying by sqrt(max(rows, columns)); 0.2 is usual for AdamW
# (Liu et al., arXiv:2502.16982, section 2.2).
_RMS = 0.2


def muon(config: OptimizerConfig, model: ModelConfig | None) -> optax.GradientTransformationExtraArgs:
    """Muon (Jordan et al. 2024; Liu et al., arXiv:2502.16982) for layers' matrices, otherwise AdamW.

        m  <- b m + g,   w  <- w - lr (0.2 sqrt(max(rows, columns)) U V^T + decay w)

    U V^T: approximate orthogonal factor of m, by Newton-Schulz iterations. AdamW's learning rate is suitable.
    AdamW has Nesterov momentum here.
    """
    assert model is not None, "Muon needs the model for the dimensions of matrices"
    of_matrices = optax.chain(optax.trace(_BETA, nesterov=True), _orthogonalised(model))
    of_others = optax.scale_by_adam(config.b1, config.b2, config.eps, nesterov=True)
    return optax.chain(
        optax.partition({"muon": of_matrices, "adam": of_others}, partial(_labels, model)),
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        optax.scale_by_learning_rate(learning_rate(config)),
    )


def _orthogonalised(model: ModelConfig) -> optax.GradientTransformation:
    """Approximately 0.2 sqrt(max(rows, columns)) U V^T of each update U S V^T.

    An all-to-all for each split dimension distributes the layers over the n devices that split a matrix, and
    another brings back the results. Each device computes 1/n of the layers, rounded up.
    """

    def of_weight(path: str, param: Param, x: Array) -> Array:
        with jax.named_scope(tensor_of(path)):
            return _of_stack(x, param)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return _of_each(model, of_weight, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _labels(model: ModelConfig, tree: optax.Params) -> Any:
    """ "muon" for each parameter that Muon updates, "adam" for the others."""
    return _of_each(model, lambda path, param, _: "muon" if is_orthogonalised(path, param) else "adam", tree)


def _of_each(model: ModelConfig, leaf: Callable[[str, Param, Any], Any], tree: optax.Params) -> Any:
    """The tree of `leaf(path, parameter, x)` for each x."""
    params = parameters(model)

    def of_leaf(keys: tuple[Any, ...], x: Any) -> Any:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        return leaf(path, params[path], x)

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def _of_stack(x: Array, param: Param) -> Array:
    """The orthogonal factors of the matrices of all layers, x[L, ...], split as x."""
    mesh, spec = get_abstract_mesh(), spec_of(x)
    if mesh.empty:
        return _factors(x, param)
    split = [(dim, axes_of(entry)) for dim, entry in enumerate(spec) if is_of_matrix(param, dim)]
    split = [(dim, axes) for dim, axes in split if prod(mesh.shape[axis] for axis in axes) > 1]

    def of_block(block: Array) -> Array:
        return _exchanged(block, param, split)

    return jax.shard_map(of_block, in_specs=spec, out_specs=spec, check_vma=False)(x)


def _exchanged(block: Array, param: Param, split: Sequence[tuple[int, Axes]]) -> Array:
    num_layers, dealt = len(block), prod(lax.axis_size(axes) for _, axes in split)
    x = jnp.pad(block, [(0, -num_layers % dealt), *[(0, 0)] * (block.ndim - 1)])
    for dim, axes in split:
        x = lax.all_to_all(x, axes, split_axis=0, concat_axis=dim, tiled=True)
    x = _factors(x, param)
    for dim, axes in reversed(split):
        x = lax.all_to_all(x, axes, split_axis=dim, concat_axis=0, tiled=True)
    return x[:num_layers]


def _factors(x: Array, param: Param) -> Array:
    matrix = [dim for dim in range(x.ndim) if is_of_matrix(param, dim)]
    rows = tuple(dim for dim in matrix if param.letters[dim] in param.fan_in)
    columns = tuple(dim for dim in matrix if dim not in rows)
    # Optax's momentum would be of whole matrices, so it is unused.
    numbers = MuonDimensionNumbers(rows, columns)
    factor = scale_by_muon(
        ns_steps=NEWTON_SCHULZ_STEPS, beta=0.0, nesterov=False, weight_dimension_numbers=numbers
    )
    sizes = [prod(x.shape[dim] for dim in dims) for dims in (rows, columns)]
    return _RMS * max(sizes) ** 0.5 * factor.update(x, factor.init(x))[0]
