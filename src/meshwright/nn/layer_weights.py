"""The parameters of inference: an array for each layer, its summed dimensions last.

Examples are wq[N, H, D] and w_out[D, F]. With them XLA for CPU computes one row's product x W^T at memory
speed and copies nothing (12 x 768 x 2048 in f32, one row: 11 ms, as W[D, F] 18; bf16, 16 rows: 32 and 37;
jax 0.10.2, two shared cores).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshwright.dtypes import number_type
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.mixers import BLOCK_GATES
from meshwright.models.parameters import Param, dimensions, of_a_layer, parameters
from meshwright.native import kernels
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.products.panels import Panels, in_panels
from meshwright.nn.products.quantised import Quantised, group_size, quantise
from meshwright.nn.products.stored_products import Elsewhere, Joined, transposed
from meshwright.nn.start.device_mesh import array_type
from meshwright.notation.array import ShardedArray
from meshwright.platforms import platform_of

_Params = dict[str, Any]

# Matrices with other uses than products of rows: looked up, absorbed, of a router, or by blocks.
_READ_OTHERWISE = {"positions", "router", "wk_up", "wv_up", "wo_down", *BLOCK_GATES}
_BEFORE_ATTENTION = {"wq_bias", "wk_bias", "wv_bias"}
# Weights that are multiplied by one input, stored as one array on platforms where that is faster.
_OF_ONE_INPUT = ("wq", "wk", "wv"), ("w_gate", "w_in"), ("shared_gate", "shared_in")


def stored_letters(param: Param) -> str:
    """The letters of one layer's array: without the layer, and for matrices with summed letters last.

    >>> stored_letters(Param("LDNH")), stored_letters(Param("LD", "ones")), stored_letters(Param("VD"))
    ('NHD', 'D', 'VD')
    """
    letters = of_a_layer(param.letters)
    if param.init != "normal":
        return letters
    return "".join(sorted(letters, key=lambda letter: letter in param.fan_in))


def layered(
    params: Mapping[str, Any],
    config: ModelConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    *,
    with_panels: bool = False,
    cuts: dict[str, Any] | None = None,
) -> _Params:
    """The parameters of `nn/params.py` with an array a layer, as InferenceOps reads them.

    with_panels: store every eligible weight in panels, for the native kernels, which must be
    available. cuts: compiled programs by path, kept from call to call. Takes the arrays out of `params`
    one by one, so that memory holds at most one parameter twice.
    """
    stacks = {name: dict(node) for name, node in params.items() if isinstance(node, Mapping)}
    plain = {name: node for name, node in params.items() if not isinstance(node, Mapping)}
    cuts = {} if cuts is None else cuts

    def leaf(path: str, param: Param, row: int | None) -> Any:
        group, _, name = path.rpartition("/")
        if path not in cuts:  # one program cuts every row of a stack
            types = _type(config, layout, mesh, path, param, with_panels)
            cut = partial(_cut, param, layout.precision.stored_dtype(path, param), types)
            cuts[path] = jax.jit(cut, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, types))
        with jax.set_mesh(mesh):
            if row is None:
                return cuts[path](plain[name], None)
            return cuts[path](stacks[group][name], np.int32(row))

    return _with_joined(
        _build(config, leaf, lambda path: _forget(stacks, plain, path)), mesh, jnp.concatenate
    )


def _cut(param: Param, dtype: str, types: Any, whole: Array, row: Array | None) -> Any:
    """One layer's array out of a stack, with summed dimensions last, stored as `dtype` in the given types."""
    layer = whole if row is None else lax.dynamic_index_in_dim(whole, row, keepdims=False)
    letters = of_a_layer(param.letters)
    turned = jnp.transpose(layer, [letters.index(letter) for letter in stored_letters(param)])
    num_summed = len(param.fan_in)
    if number_type(dtype).scales is None:
        made = turned.astype(jax_dtype(dtype))
        return in_panels(made, num_summed) if isinstance(types, Panels) else made
    made = quantise(turned, dtype, num_summed, types.group)
    if isinstance(types.values, Panels):
        made = replace(made, values=in_panels(made.values, num_summed))
    if isinstance(types.scales, Panels):
        made = replace(made, scales=in_panels(made.scales, num_summed))
    return made


def _forget(stacks: Mapping[str, dict], plain: dict, path: str) -> None:
    group, _, name = path.rpartition("/")
    (stacks[group] if group else plain).pop(name)


def abstract_layered(
    config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, *, with_panels: bool = False
) -> _Params:
    """The types of `layered`, to compile for."""

    def leaf(path: str, param: Param, row: int | None) -> Any:
        return _type(config, layout, mesh, path, param, with_panels)

    def concatenated(types: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
        first = types[0]
        shape = sum(one.shape[0] for one in types), *first.shape[1:]
        return jax.ShapeDtypeStruct(shape, first.dtype, sharding=first.sharding)

    return _with_joined(_build(config, leaf, lambda path: None), mesh, concatenated)


def _with_joined(params: _Params, mesh: jax.sharding.Mesh, concatenate: Callable) -> _Params:
    """The parameters with weights of one input joined, on platforms that join unsplit weights."""
    if not platform_of(mesh).joins_weights:
        return params
    stacks = [stack for stack in params.values() if isinstance(stack, list)]
    for weights in (layer for stack in stacks for layer in stack):
        for names in _OF_ONE_INPUT:
            parts = [weights[name] for name in names if name in weights]
            if len(parts) == len(names) and _can_be_joined(parts):
                whole = jax.tree.map(lambda *leaves: concatenate(leaves), *parts)
                sizes = tuple(jax.tree.leaves(part)[0].shape[0] for part in parts)
                weights |= dict.fromkeys(names, Elsewhere()) | {names[0]: Joined(whole, sizes)}
    return params


def _can_be_joined(parts: Sequence[Any]) -> bool:
    """Whether parts differ only in their first dimensions, no axis splits them, and panels are full."""
    alike = {
        (jax.tree.structure(part), *((leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(part)))
        for part in parts
    }
    leaves = jax.tree.leaves(parts)
    panels = jax.tree.leaves(parts, is_leaf=lambda part: isinstance(part, Panels))
    # The rows of such a weight are all its dimensions but the last, over which its product sums.
    are_whole = all(
        kernels.has_whole_panels(prod(part.shape[:-1])) for part in panels if isinstance(part, Panels)
    )
    return (
        are_whole and len(alike) == 1 and all(axes is None for leaf in leaves for axes in leaf.sharding.spec)
    )


def _type(
    config: ModelConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    path: str,
    param: Param,
    with_panels: bool,
) -> Any:
    """The type of one layer's array: a ShapeDtypeStruct, Panels of one, or a Quantised of such."""
    sizes, dtype = dimensions(config, path), layout.precision.stored_dtype(path, param)
    array = _sharding(layout, path, param)
    lies_in_panels = with_panels and _can_lie_in_panels(config, layout, path, param)
    record = number_type(dtype)
    if record.scales is None:
        plain = array_type(array, mesh, sizes, jax_dtype(dtype))
        return Panels(plain) if lies_in_panels else plain
    if record.group:
        last = array.dims[-1]
        num_shards = layout.mesh.size(array.axes_of(last))
        groups = sizes[last] // group_size(sizes[last] // num_shards, record.group)
        in_pair, stored = (2, jnp.int8) if platform_of(mesh).packs_int4 else (1, jax_dtype(dtype))
        parts = (
            array_type(array, mesh, {**sizes, last: sizes[last] // in_pair}, stored),
            array_type(array, mesh, {**sizes, last: groups}, jnp.float32),
        )
        return Quantised(*(map(Panels, parts) if lies_in_panels else parts))
    values: Any = array_type(array, mesh, sizes, jax_dtype(dtype))
    values = Panels(values) if lies_in_panels else values
    kept = tuple(letter for letter in array.dims if letter not in param.fan_in)
    used = layout.rules.used.split(array.name, "".join(array.dims))
    scales = ShardedArray(array.name, kept, tuple(used.axes_of(letter) for letter in kept))
    return Quantised(values, array_type(scales, mesh, sizes, jnp.float32))


def passes_over_zeros(config: ModelConfig, layout: Layout) -> bool:
    """Whether, with panels, rows of zeros stay zeros through all layers, so that products may skip them.

    Biases make them nonzero, except biases of queries, keys and values: attention of a padding token is zero.
    """
    of_layers = {path: param for path, param in parameters(config).items() if "/" in path}
    matrices = {path: param for path, param in of_layers.items() if param.init == "normal"}
    biases = {path.rpartition("/")[2] for path in of_layers if path.endswith("_bias")}
    stay = biases <= _BEFORE_ATTENTION and not config.attention_sinks and config.positions != "alibi"
    stay &= config.state_mixer is None  # its padding rows read a state
    return stay and all(_can_lie_in_panels(config, layout, *item) for item in matrices.items())


def _can_lie_in_panels(config: ModelConfig, layout: Layout, path: str, param: Param) -> bool:
    """Whether only products read the weight, in its stored sharding and type."""
    name, dtype = path.rpartition("/")[2], layout.precision.stored_dtype(path, param)
    is_of_products = param.init == "normal" and name not in _READ_OTHERWISE and "E" not in param.letters
    is_of_products &= len(of_a_layer(param.letters)) > 1
    if not is_of_products or (name == "embed" and not config.tied_embeddings):
        return False
    stored = _sharding(layout, path, param)
    used = layout.rules.used.split(stored.name, "".join(stored.dims))
    if used.axes != stored.axes:
        return False
    record = number_type(dtype)
    precision = layout.precision
    is_rounded = precision.matmul_dtype == record.served_operands
    if (record.served_operands if is_rounded else precision.compute_dtype) not in record.native_operands:
        return False
    sizes = dimensions(config, path)
    summed = [sizes[letter] // layout.mesh.size(used.axes_of(letter)) for letter in param.fan_in]
    if record.group:
        # Tables are read by rows, which `rows_of_panels` does not multiply by the scales of groups.
        return name != "embed" and kernels.has_whole_groups(group_size(summed[-1], record.group))
    return kernels.has_whole_steps(prod(summed), jax_dtype(dtype))


def _build(config: ModelConfig, leaf: Callable, done: Callable[[str], None]) -> _Params:
    """{"embed": ..., "layers": [{"wq": ...}, ...], ...} with leaf(path, param, row) at every array."""
    tree: _Params = {}
    for path, param in parameters(config).items():
        group, _, name = path.rpartition("/")
        if not group:
            tree[name] = leaf(path, param, None)
        else:
            num_rows = dimensions(config, path)[param.letters[0]]
            rows = tree.setdefault(group, [{} for _ in range(num_rows)])
            for row, node in enumerate(rows):
                node[name] = leaf(path, param, row)
        done(path)
    return tree


def _sharding(layout: Layout, path: str, param: Param) -> ShardedArray:
    name, letters = path.rpartition("/")[2], of_a_layer(param.letters)
    return transposed(layout.weight(name, letters), stored_letters(param))
