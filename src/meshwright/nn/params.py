"""Parameters as a pytree, from the one description in `models/transformer.py`.

{"embed": [V, D], "layers": {"wq": [L, D, N, H], ...}, "final_norm": [D], "unembed": [D, V]}
"""

import zlib
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import Param, dimensions, parameters
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.frozen import Frozen, frozen, frozen_dtype, frozen_type
from meshwright.nn.start.device_mesh import named_sharding


def build(
    config: ModelConfig, leaf: Callable[[str, Param], Any], *, only: Collection[str] | None = None
) -> dict[str, Any]:
    """The parameter pytree with `leaf(path, param)` at every parameter, or only at paths in `only`."""
    tree: dict[str, Any] = {}
    for path, param in parameters(config).items():
        if only is not None and path not in only:
            continue
        group, _, name = path.rpartition("/")
        node = tree.setdefault(group, {}) if group else tree
        node[name] = leaf(path, param)
    return tree


def shardings(
    config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, *, only: Collection[str] | None = None
) -> dict[str, Any]:
    """The stored sharding of every parameter, or only of paths in `only`."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_params(config, layout, mesh, only=only))


def abstract_params(
    config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, *, only: Collection[str] | None = None
) -> dict[str, Any]:
    """Every parameter as a ShapeDtypeStruct with its sharding: for compiling and restoring.

    Frozen weights in narrow types are a Frozen of two such types.
    """
    dtype = jax_dtype(layout.precision.trained_dtype)

    def leaf(path: str, param: Param) -> Any:
        sizes = dimensions(config, path)
        sharding = named_sharding(layout.weight(path, param.letters), mesh)
        wide = jax.ShapeDtypeStruct(param.shape(sizes), dtype, sharding=sharding)
        narrow = frozen_dtype(layout, path, param)
        return wide if narrow is None else frozen_type(wide, narrow, path, param)

    return build(config, leaf, only=only)


def init_params(
    config: ModelConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    seed: int,
    *,
    only: Collection[str] | None = None,
    part: Callable[[str, jax.Array], jax.Array] | None = None,
) -> dict[str, Any]:
    """New parameters, made in place on their shards; the values do not depend on the layout.

    only: the paths to make, by default all. part: given a path and its whole array, the part to keep.
    """
    dtype = jax_dtype(layout.precision.trained_dtype)
    types = flatten(abstract_params(config, layout, mesh, only=only))

    def leaf(path: str, param: Param) -> Any:
        sizes = dimensions(config, path)
        scale = prod(sizes[letter] for letter in param.fan_in) ** -0.5
        stored, tree = jax.tree.flatten(types[path])
        # `part` is a new function in each call, and a kept program of it would never be used again.
        start = _kept_start if part is None else partial(_start, part=partial(part, path))
        program = start(param.init, param.shape(sizes), scale, dtype, seed, tuple(stored), tree)
        return program(np.uint32(zlib.crc32(path.encode())))

    with jax.set_mesh(mesh):
        return build(config, leaf, only=only)


def _start(
    init: str,
    shape: tuple[int, ...],
    scale: float,
    dtype: np.dtype,
    seed: int,
    stored: tuple[jax.ShapeDtypeStruct, ...],
    tree: object,
    part: Callable[[jax.Array], jax.Array] | None = None,
) -> Callable[[np.uint32], Any]:
    """The program of a parameter's first values. It takes the parameter's number.

    stored: leaves of the stored parameter, with their shardings. tree: their structure.
    part: as in init_params, of this parameter.
    """
    types = jax.tree.unflatten(tree, stored)

    def values(number: jax.Array) -> jax.Array:
        if init in ("ones", "zeros"):
            return jnp.full(shape, float(init == "ones"), dtype)
        key = jax.random.fold_in(jax.random.key(seed), number)
        if init == "decay":
            return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0)).astype(dtype)
        if init == "slow_decay":
            squared = jax.random.uniform(key, shape, jnp.float32, 0.9**2, 0.999**2)
            return jnp.log(jnp.expm1(-0.5 * jnp.log(squared))).astype(dtype)
        if init == "experts":
            num_experts = round(scale**-2)  # whose inverse root is the scale
            # A random expert and those that follow it, which are different.
            first = jax.random.randint(key, (*shape[:-1], 1), 0, num_experts)
            following = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
            chosen = (first + following) % num_experts - num_experts // 2
            return chosen.astype(dtype)
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)

    def start(number: jax.Array) -> Any:
        weight = values(number) if part is None else part(values(number))
        return frozen(weight, types) if isinstance(types, Frozen) else weight

    return jax.jit(start, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, types))


# A program for each kind of parameter, shared by parameters of the same shape and by later models: a program
# of all 66 parameters took 4.1 s to compile on 8 virtual CPU devices, one of each kind takes 1.1 s.
_kept_start = lru_cache(maxsize=1024)(_start)


def as_frozen(
    config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, path: str, weight: jax.Array
) -> Any:
    """A whole weight as the layout stores it: a Frozen if its type is narrow."""
    types = flatten(abstract_params(config, layout, mesh, only=[path]))[path]
    if not isinstance(types, Frozen):
        return weight
    with jax.set_mesh(mesh):
        where = jax.tree.map(lambda leaf: leaf.sharding, types)
        return jax.jit(partial(frozen, types=types), out_shardings=where)(weight)


def merged_params(config: ModelConfig, *trees: Mapping[str, Any]) -> dict[str, Any]:
    """One pytree of the parameters in any of `trees`; later trees take precedence."""
    flat = {path: leaf for tree in trees for path, leaf in flatten(tree).items()}
    return build(config, lambda path, _: flat[path], only=flat)


def trained(config: ModelConfig) -> frozenset[str]:
    """The paths of the parameters that training changes."""
    return frozenset(path for path, param in parameters(config).items() if param.trained)


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters by path: `layers/wq`."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}/{inner}": leaf for inner, leaf in value.items()})
        else:
            flat[name] = value
    return flat
