"""Functions that every device runs on its own blocks, also within a stage of a pipeline.

A `shard_map` that is mapped over stages takes their dimension whole: every device is sent the blocks of all
stages, and computes on them (jax 0.10.2, whose rule for explicit axes has None there). Here the dimension is
split over `pipe`, as it is for all arrays of stages.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec, get_abstract_mesh, reshard
from jax.typing import DTypeLike

from meshwright.layout.rules import STAGES
from meshwright.nn.kernel_names import ALLOCATE
from meshwright.nn.start.device_mesh import platform
from meshwright.notation.array import Axes

# The name of a kernel's residuals, other than its inputs, for remat policies.
KEPT = "attention"
_Move = Callable[[Sequence[Array]], Sequence[Array]]


def each_device(local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`local` on each device's blocks of arrays that are split so, which JAX cannot differentiate.

    in_specs, out_specs: trees like the arguments and the result.
    """
    given: list[PartitionSpec] = jax.tree.leaves(in_specs)

    def run(*arguments: object) -> Any:
        arrays, structure = jax.tree.flatten(arguments)

        def of_blocks(*blocks: Array) -> Any:
            return local(*jax.tree.unflatten(structure, blocks))

        mapped = _within_a_stage if get_abstract_mesh().shape.get(STAGES, 1) > 1 else _mapped
        return mapped(of_blocks, given, out_specs)(*arrays)

    return run


def _within_a_stage(
    local: Callable[..., Any], given: Sequence[PartitionSpec], taken: Any
) -> Callable[..., Any]:
    """`_mapped` for specs with `reduced` or `unreduced`, which `shard_map` refuses in a stage (jax 0.10.2).

    Partial sums are returned as an array for each device, and added outside.
    """
    plain = [PartitionSpec(*spec.partitions, unreduced=spec.unreduced) for spec in given]

    def apart(spec: PartitionSpec) -> PartitionSpec:
        over = tuple(axis for axis in get_abstract_mesh().axis_names if axis in spec.unreduced)
        return PartitionSpec(over, *spec.partitions) if over else spec

    def each_taken(change: Callable[[Array, PartitionSpec], Array], made: Any) -> Any:
        """`change` applied to every partial sum; as in `shard_map`, one spec may cover a tree of arrays."""

        def changed(spec: PartitionSpec, arrays: Any) -> Any:
            return jax.tree.map(lambda x: change(x, spec) if spec.unreduced else x, arrays)

        return jax.tree.map(changed, taken, made)

    def of_blocks(*blocks: Array) -> Any:
        return each_taken(lambda x, _: x[None], local(*blocks))

    def run(*arrays: Array) -> Any:
        arrays = tuple(
            reshard(x, spec_plain) if spec.reduced else x
            for x, spec, spec_plain in zip(arrays, given, plain, strict=True)
        )
        made = _mapped(of_blocks, plain, jax.tree.map(apart, taken))(*arrays)
        return each_taken(lambda x, spec: lax.reduce_sum(x, (0,), out_sharding=spec), made)

    return run


def with_gradient(
    local: Callable[..., Array],
    in_specs: Sequence[PartitionSpec],
    out_spec: PartitionSpec,
    num_differentiated: int,
    *,
    kept: str | None = None,
    constants: Callable[[], Sequence[Array]] = tuple,
    names: Sequence[str] = (),
    moves: tuple[_Move, _Move] | None = None,
) -> Callable[..., Array]:
    """`each_device`, differentiated in its first arguments; residuals stay on their device.

    Cotangents are sums over axes that split the result but not the argument, and stay partial over axes in
    the argument's `reduced` type. kept: the name, for remat policies, of the result and of residuals other
    than arguments. constants: makes the last arguments of `local`, again in each pass: no pass saves them for
    another. names: of the arguments, for the sums of their cotangents over devices. moves: a function
    applied to a device's blocks of the arguments before `local`, and its inverse, for their cotangents.
    """
    given = tuple(in_specs)
    arrange, arrange_back = moves or (tuple, tuple)
    spec_of_all = PartitionSpec(tuple(axis for axis in get_abstract_mesh().axis_names if axis != STAGES))
    # Residuals that are an argument, the result or a constant: index of the residual -> index among them.
    known: dict[int, int] = {}

    def computed(*blocks: Array) -> Array:
        return local(*arrange(blocks), *constants())

    def differentiated(blocks: Sequence[Array], fixed: Sequence[Array]) -> tuple[Array, Callable[..., Any]]:
        first, others = blocks[:num_differentiated], blocks[num_differentiated:]
        return jax.vjp(lambda *first: local(*first, *others, *fixed), *first)

    def out_and_saved(*blocks: Array) -> tuple[Array, list[Array]]:
        nonlocal known
        fixed, blocks = constants(), tuple(arrange(blocks))
        out, pull_back = differentiated(blocks, fixed)
        leaves = jax.tree.leaves(pull_back)
        places = {id(block): place for place, block in enumerate((*blocks, out, *fixed))}
        known = {n: places[id(leaf)] for n, leaf in enumerate(leaves) if id(leaf) in places}
        return out, [leaf[None] for n, leaf in enumerate(leaves) if n not in known]

    def forward(*arrays: Array) -> tuple[Array, Any]:
        made = each_device(out_and_saved, given, (out_spec, spec_of_all))(*arrays)
        out, saved = jax.tree.map(lambda x: checkpoint_name(x, kept) if kept else x, made)
        return out, ((*arrays, out), saved)

    def pulled_back(arrays: Sequence[Array], saved: Sequence[Array], d_out: Array) -> tuple[Array, ...]:
        rest, fixed = iter(saved), constants()
        *blocks, out = arrays
        arrays = (*arrange(blocks), out)
        operands = (*arrays, *fixed)
        leaves = [operands[known[n]] if n in known else next(rest)[0] for n in range(len(known) + len(saved))]
        # Traced again, without computing: within a stage of a pipeline types differ.
        structure = jax.tree.structure(jax.eval_shape(lambda *b: differentiated(b, fixed)[1], *arrays[:-1]))
        cotangents = arrange_back(jax.tree.unflatten(structure, leaves)(d_out))
        summed = []
        for d, spec, name in zip_longest(cotangents, given[: len(cotangents)], names):
            with jax.named_scope(name) if name else nullcontext():
                summed.append(_summed(d, spec, out_spec))
        return tuple(summed)

    def backward(residuals: Any, d_out: Array) -> tuple[Array | None, ...]:
        arrays, saved = residuals
        specs = (*given, out_spec), [spec_of_all] * len(saved), of_cotangent(out_spec)
        taken = tuple(of_cotangent(spec) for spec in given[:num_differentiated])
        cotangents = each_device(pulled_back, specs, taken)(arrays, saved, d_out)
        return (*cotangents, *[None] * (len(given) - num_differentiated))

    @jax.custom_vjp
    def run(*arrays: Array) -> Array:
        return each_device(computed, given, out_spec)(*arrays)

    run.defvjp(forward, backward)
    return run


def own_copies(x: Array, axes: Collection[str] | None = None) -> Array:
    """Copies of x[n, ...] for the devices in `axes`, or its `reduced` ones; each adds to its cotangent.

    Within a stage of a pipeline no `shard_map` takes such types (jax 0.10.2).
    """
    spec = spec_of(x)
    axes = spec.reduced if axes is None else axes
    over = tuple(axis for axis in get_abstract_mesh().axis_names if axis in axes)
    num_copies = prod(get_abstract_mesh().shape[axis] for axis in over)

    @jax.custom_vjp
    def copies(x: Array) -> Array:
        whole = reshard(x, PartitionSpec(*spec.partitions))
        split = PartitionSpec(over or None, *spec.partitions)
        return jnp.broadcast_to(whole[None], (num_copies, *x.shape), out_sharding=split)

    def backward(_: None, d: Array) -> tuple[Array]:
        return (lax.reduce_sum(d, (0,), out_sharding=of_cotangent(spec)),)

    copies.defvjp(lambda x: (copies(x), None), backward)
    return copies(x)


def zeros_after(read: Sequence[Array], shape: Sequence[int], dtype: DTypeLike, number: int = 0) -> Array:
    """Zeros in an array of their own, allocated only once the arrays `read` exist.

    XLA merges equal zeros into a single array, which stays allocated until its last use, and each loop that
    writes into it takes a copy. number: distinguishes several such arrays with the same `read`.
    """
    return jnp.broadcast_to(never(jnp.min(_first_numbers(read, number))).astype(dtype), shape)


def _first_numbers(read: Sequence[Array], number: int) -> Array:
    """f32: element `number` of each array."""
    first = [lax.index_in_dim(jnp.ravel(x), number % x.size, keepdims=False) for x in read]
    return jnp.stack([x.astype(jnp.float32) for x in first])


def unfilled_after(read: Sequence[Array], shape: Sequence[int], dtype: DTypeLike, number: int = 0) -> Array:
    """An array to write into: `zeros_after`, or unwritten memory on platforms that are `unfilled`.

    XLA for TPU schedules `lax.empty`, which has no operands, long before its use (jax 0.10.2, libtpu 0.0.42:
    two layers of Mixtral on 8 v5p took 10.8 GB in place of 9.3). The kernel here, which writes nothing, has
    an operand that depends on `read`.
    """
    if not platform().unfilled:
        return zeros_after(read, shape, dtype, number)
    from jax.experimental import pallas as pl

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    allocate = pl.pallas_call(
        lambda first, out: None,
        out_shape=jax.ShapeDtypeStruct(tuple(shape), dtype),
        in_specs=[anywhere],
        out_specs=anywhere,
        name=ALLOCATE,
    )
    return allocate(_first_numbers(read, number))


def never(x: Array) -> Array:
    """False, in a form that XLA cannot fold before x exists: no number is less than -inf."""
    return x.astype(jnp.float32) < -jnp.inf


def of_cotangent(spec: PartitionSpec) -> PartitionSpec:
    """The sharding of a cotangent: partial if the array is typed `reduced`, and the other way round."""
    return PartitionSpec(*spec.partitions, unreduced=spec.reduced, reduced=spec.unreduced)


def spec_of(x: Array) -> PartitionSpec:
    """The sharding of every dimension of x."""
    spec = jax.typeof(x).sharding.spec
    parts = (*spec.partitions, *[None] * (x.ndim - len(spec.partitions)))
    return PartitionSpec(*parts, unreduced=spec.unreduced, reduced=spec.reduced)


def partitions_of(x: Array) -> tuple[Any, ...]:
    """The mesh axes that split each dimension of x."""
    return jax.typeof(x).sharding.spec.partitions


def _summed(cotangent: Array, spec: PartitionSpec, out_spec: PartitionSpec) -> Array:
    known = {*_axes(spec), *spec.reduced, *spec.unreduced}
    axes = tuple(axis for axis in (*_axes(out_spec), *out_spec.unreduced) if axis not in known)
    return lax.psum(cotangent, axes) if axes else cotangent


def _axes(spec: PartitionSpec) -> Axes:
    return tuple(axis for entry in spec.partitions for axis in axes_of(entry))


def axes_of(entry: Any) -> Axes:
    """The axes that one entry of a PartitionSpec names."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _mapped(local: Callable[..., Any], given: Sequence[PartitionSpec], taken: Any) -> Callable[..., Any]:
    @custom_vmap
    def run(*arrays: Array) -> Any:
        return jax.shard_map(local, in_specs=tuple(given), out_specs=taken, check_vma=False)(*arrays)

    def of_stages(num_stages: int, are_of_stages: Sequence[bool], *arrays: Array) -> tuple[Any, Any]:
        """All stages at once; each device has one stage."""

        def of_stage(*blocks: Array) -> Any:
            blocks_local = (x[0] if mapped else x for x, mapped in zip(blocks, are_of_stages, strict=True))
            return jax.tree.map(lambda x: x[None], local(*blocks_local))

        split = tuple(
            _over_stages(spec) if mapped else spec for spec, mapped in zip(given, are_of_stages, strict=True)
        )
        run = jax.shard_map(
            of_stage, in_specs=split, out_specs=jax.tree.map(_over_stages, taken), check_vma=False
        )
        out = run(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    run.def_vmap(of_stages)
    return run


def _over_stages(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(STAGES, *spec.partitions, unreduced=spec.unreduced, reduced=spec.reduced)
