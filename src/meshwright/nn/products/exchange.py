"""Collectives that XLA's partitioner would split into several, each as a single collective.

XLA makes two all-gathers of a `reshard` from A[I_X, J_Y] to A[I, J], gathers the whole array for one from
A[I_XY, J, K] to A[I, J_X, K_Y], and adds a permute to one from A[I_XY, J] to A[I, J_YX] (jax 0.10). Here
every device cuts its block into a part for each of the n in its group, the parts change hands in one
collective of JAX, and are put together:

    all_gather       [...] -> [n, ...] -> joined
    reduce_scatter   cut -> [n, ...] -> [...]
    all_to_all       cut -> [n, ...] -> [n, ...] -> joined
"""

from collections.abc import Mapping
from math import prod

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.nn.each_device import each_device
from meshwright.nn.start.device_mesh import partition_spec
from meshwright.notation.array import Axes
from meshwright.notation.collective import Collective


def is_exchange(step: Collective) -> bool:
    """Whether `step` adds axes to several dimensions, removes some from several, or reorders moved axes."""
    added, taken = ([axes for axes in changed if axes] for changed in (_added(step), _taken(step)))
    return max(len(added), len(taken)) > 1 or (step.op == "all_to_all" and added != taken)


def exchange(x: Array, step: Collective) -> Array:
    """`step.result` of x, sharded as `step.operand`. Call under `jax.set_mesh`."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)

    def local(block: Array) -> Array:
        match step.op:
            case "all_gather":
                return _joined(lax.all_gather(block, step.axes), step, sizes)
            case "reduce_scatter":
                return lax.psum_scatter(_cut(block, step, sizes), step.axes)
            case "all_to_all":
                return _joined(lax.all_to_all(_cut(block, step, sizes), step.axes, 0, 0), step, sizes)
        raise AssertionError(f"{step}: a collective that `reshard` already makes as one")

    specs = partition_spec(step.operand), partition_spec(step.result)
    return each_device(local, (specs[0],), specs[1])(x)


def _cut(block: Array, step: Collective, sizes: Mapping[str, int]) -> Array:
    """[n, ...]: the part of each device of the group, in the order of `step.axes`."""
    shape: list[int] = []
    at: dict[str, int] = {}  # the dimension that each axis cuts
    kept: list[int] = []
    for length, axes in zip(block.shape, _added(step), strict=True):
        at |= {axis: len(shape) + i for i, axis in enumerate(axes)}
        shape += [sizes[axis] for axis in axes]
        kept.append(len(shape))
        shape.append(length // prod(sizes[axis] for axis in axes))
    parts = jnp.transpose(block.reshape(shape), [*(at[axis] for axis in step.axes), *kept])
    return parts.reshape(-1, *(shape[i] for i in kept))


def _joined(parts: Array, step: Collective, sizes: Mapping[str, int]) -> Array:
    """The block that the parts of the group, [n, ...] in the order of `step.axes`, make together."""
    split = parts.reshape(*(sizes[axis] for axis in step.axes), *parts.shape[1:])
    order: list[int] = []
    shape: list[int] = []
    for dim, (length, axes) in enumerate(zip(parts.shape[1:], _taken(step), strict=True)):
        order += [*(step.axes.index(axis) for axis in axes), len(step.axes) + dim]
        shape.append(length * prod(sizes[axis] for axis in axes))
    return jnp.transpose(split, order).reshape(shape)


def _added(step: Collective) -> list[Axes]:
    """The axes that each dimension gains."""
    pairs = zip(step.operand.axes, step.result.axes, strict=True)
    return [tuple(axis for axis in after if axis not in before) for before, after in pairs]


def _taken(step: Collective) -> list[Axes]:
    """The axes that each dimension loses."""
    pairs = zip(step.operand.axes, step.result.axes, strict=True)
    return [tuple(axis for axis in before if axis not in after) for before, after in pairs]
