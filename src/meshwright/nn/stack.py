"""The layers of a model, one after another, as loops over stacked weights.

Layers of one stack differ only in their kind, such as their window. A loop has the kind as data
(`KindInLoop`), so that it reads its stack from end to end: cut into periods of local and global layers, the
weights of Gemma-3 were copied every step (43 MB of temporaries for 31 MB of weights).
If stacks alternate, a step of the loop runs one period of them.

Unrolled, XLA for CPU copies each layer's weights out of the stack (14 layers of 15 MB, one token: 185 ms and
176 MB of temporaries, in a loop 88 ms and 13 MB, with arrays of their own a layer 68 ms; jax 0.10.2).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from meshwright.models.layer_kinds import Layer, LayerKind, Stack, Window
from meshwright.models.scopes import SHARED_KV

# One layer: (x, its weights, a sum over the layers, kind, keys and values of the last layer that made any) ->
# (x, the sum, its own keys and values).
RunLayer = Callable[[Array, Any, Any, "KindInLoop", Any], tuple[Array, Any, Any]]


class KindInLoop(NamedTuple):
    """The kind of the layer that runs: `among[which]`, or the only one of `among`."""

    among: tuple[LayerKind, ...]
    which: Array | None = None

    @property
    def shares_kv(self) -> bool:
        return self.among[0].shares_kv

    @property
    def variant(self) -> int:
        return self.among[0].variant

    @property
    def windows(self) -> tuple[Window | None, ...]:
        return tuple(kind.window for kind in self.among)

    def choose(self, values: Sequence[Any]) -> Any:
        """This layer's array, of `values` with one for each of `among`, all finite.

        A sum, since JAX would gather a selection by numbers that are split over stages.
        """
        if self.which is None:
            return values[0]
        return sum((self.which == number).astype(value.dtype) * value for number, value in enumerate(values))


class _Loop(NamedTuple):
    """Consecutive layers whose stacks repeat: `times` periods of `period` layers each."""

    layers: Sequence[Layer]
    period: int
    times: int

    def at(self, place: int) -> list[Layer]:
        """The layers at one place of the period."""
        return list(self.layers[place :: self.period])

    @property
    def pattern(self) -> list[Stack]:
        return [layer.kind.stack for layer in self.layers[: self.period]]


def run_layers(
    run: RunLayer, weights: Mapping[str, Any], x: Array, total: Any, layers: Sequence[Layer]
) -> tuple[Array, Any]:
    """x after `layers`, and `total` plus their losses. weights: the stacks [L, ...] by name."""
    loops = _loops(layers)
    for loop, parts in zip(loops, _parts(weights, loops, by_slices=False), strict=True):
        if loop.times == 1:
            kinds = [KindInLoop((layer.kind,)) for layer in loop.layers]
            period = {stack: _without_periods(part) for stack, part in parts.items()}
            x, total = _in_order(run, x, total, _with_weights(loop, period, kinds, by_slices=False))
        else:
            x, total = _scan(run, parts, x, total, [loop])
    return x, total


def run_stage(
    run: RunLayer,
    weights: Mapping[str, Any],
    x: Array,
    total: Any,
    stage: Array,
    layers: Sequence[Sequence[Layer]],
) -> tuple[Array, Any]:
    """x after the layers of one stage of a pipeline, and `total` plus their losses.

    weights: the stage's own. layers: of each stage; all stages have the same stacks in the same order.

    Stages run one program: if their layers are of different kinds, the number of the kind is data.
    """
    loops = [*zip(*map(_loops, layers), strict=True)]
    each_parts = _parts(weights, [of_stages[0] for of_stages in loops], by_slices=True)
    for of_stages, parts in zip(loops, each_parts, strict=True):
        x, total = _scan(run, parts, x, total, of_stages, stage)
    return x, total


def _in_order(
    run: RunLayer, x: Array, total: Mapping[str, Any], layers: Iterable[tuple[Any, KindInLoop]]
) -> tuple[Array, Any]:
    """x and the total after layers given as (weights, kind); the first has keys and values of its own."""
    shared, kinds = None, list(layers)
    for (w, kind), (_, after) in zip(kinds, [*kinds[1:], kinds[0]], strict=True):
        constants = shared
        if kind.shares_kv and after.shares_kv:
            constants, shared = _read_twice(shared)
        x, total, made = run(x, w, total, kind, constants)
        shared = shared if made is None else made
    return x, total


@jax.custom_vjp
def _read_twice(shared: Any) -> tuple[Any, Any]:
    """Two copies of shared keys and values, for a layer and for later layers; their cotangents are added.

    JAX would add them as well, but under no name that an audit could read.
    """
    return shared, shared


def _added(_: None, cotangents: tuple[Any, Any]) -> tuple[Any]:
    with jax.named_scope(SHARED_KV):
        return (jax.tree.map(jnp.add, *cotangents),)


_read_twice.defvjp(lambda shared: ((shared, shared), None), _added)


def _parts(weights: Mapping[str, Any], loops: Sequence[_Loop], *, by_slices: bool) -> list[dict[Stack, Any]]:
    """For each loop, the rows [n, ...] of each stack that it reads.

    A stack that several loops read is split once: the gradient of each slice would be padded to the whole
    stack, and padded gradients added. by_slices: see `_each`.
    """
    parts: list[dict[Stack, Any]] = [{} for _ in loops]
    for stack in dict.fromkeys(stack for loop in loops for stack in loop.pattern):
        rows_of_loops = [[layer.row for layer in loop.layers if layer.kind.stack == stack] for loop in loops]
        readers = [number for number, rows in enumerate(rows_of_loops) if rows]
        leaves, structure = jax.tree.flatten(weights[stack])
        all_rows = [*range(leaves[0].shape[0])]
        by_split = [*chain.from_iterable(rows_of_loops)] == all_rows and not by_slices
        cuts = [_cut(leaf, [rows_of_loops[number] for number in readers], by_split) for leaf in leaves]
        for number, cut in zip(readers, zip(*cuts, strict=True), strict=True):
            parts[number][stack] = jax.tree.unflatten(structure, cut)
    return parts


def _cut(leaf: Array, rows_of_parts: Sequence[Sequence[int]], by_split: bool) -> Sequence[Array]:
    """The consecutive rows of each part."""
    if len(rows_of_parts) == 1 and len(rows_of_parts[0]) == leaf.shape[0]:
        return [leaf]
    if by_split:
        return lax.split(leaf, [len(rows) for rows in rows_of_parts])
    return [leaf[rows[0] : rows[-1] + 1] for rows in rows_of_parts]


def _without_periods(part: Any) -> Any:
    """A part [n, ...] as `_each` takes the weights of one period: [...] if n is 1."""
    return jax.tree.map(lambda w: lax.squeeze(w, (0,)) if w.shape[0] == 1 else w, part)


def _with_weights(
    loop: _Loop, parts: Mapping[Stack, Any], kinds: Sequence[KindInLoop], *, by_slices: bool
) -> Iterator[tuple[Any, KindInLoop]]:
    """The layers of one period with their weights and kinds, in order."""
    left = {
        stack: iter(_each(w, loop.pattern.count(stack), by_slices=by_slices)) for stack, w in parts.items()
    }
    for stack, kind in zip(loop.pattern, kinds, strict=True):
        yield next(left[stack]), kind


def _scan(
    run: RunLayer,
    parts: Mapping[Stack, Any],
    x: Array,
    total: Mapping[str, Any],
    of_stages: Sequence[_Loop],
    stage: Array | None = None,
) -> tuple[Array, Any]:
    """x and the total after a loop that all stages of a pipeline run. parts: of `stage`, by stack."""
    loop = of_stages[0]
    kinds = [
        tuple(dict.fromkeys(layer.kind for own in of_stages for layer in own.at(place)))
        for place in range(loop.period)
    ]
    steps = {
        "weights": {
            stack: _periods(part, loop.pattern.count(stack), loop.times) for stack, part in parts.items()
        },
        "kinds": [_numbers(among, place, of_stages, stage) for place, among in enumerate(kinds)],
    }

    def body(carry: tuple[Array, Any], step: dict[str, Any]) -> tuple[tuple[Array, Any], None]:
        of_period = [KindInLoop(*kind) for kind in zip(kinds, step["kinds"], strict=True)]
        layers = _with_weights(loop, step["weights"], of_period, by_slices=stage is not None)
        return _in_order(run, *carry, layers), None

    (x, total), _ = lax.scan(body, (x, total), steps)
    return x, total


def _numbers(
    among: Sequence[LayerKind], place: int, of_stages: Sequence[_Loop], stage: Array | None
) -> Array | None:
    """For each period of a stage, the index in `among` of the layer at this place; None for one kind."""
    if len(among) == 1:
        return None
    numbers = [[among.index(layer.kind) for layer in own.at(place)] for own in of_stages]
    if stage is None or all(own == numbers[0] for own in numbers):
        return jnp.asarray(numbers[0], jnp.int32)
    # No look-up: JAX infers no sharding of the result from indices that are split over stages.
    mine = jnp.arange(len(numbers))[:, None] == stage
    return jnp.sum(jnp.where(mine, jnp.asarray(numbers, jnp.int32), 0), 0)


def _loops(layers: Sequence[Layer]) -> list[_Loop]:
    """The layers as loops, each over the most layers that repeat from its start, in the shortest period.

    Layers that share keys and values are in one period.
    """
    groups = [list(group) for _, group in groupby(layers, _group)]
    stacks: list[tuple[Stack, ...]] = [tuple(layer.kind.stack for layer in group) for group in groups]
    loops: list[_Loop] = []
    start = 0
    while start < len(groups):
        left = stacks[start:]
        counts = {n: _repeats(left, n) for n in range(1, len(left) // 2 + 1)} or {1: 1}
        period = max(counts, key=lambda n: (n * counts[n] if counts[n] > 1 else 0, -n))
        count = counts[period]
        if count == 1:
            period = 1
        repeated = groups[start : start + period * count]
        loops.append(_Loop([*chain.from_iterable(repeated)], sum(map(len, repeated)) // count, count))
        start += period * count
    return loops


def _group(layer: Layer) -> tuple[object, ...]:
    """The same for consecutive layers that share keys, values or chosen keys, and no others."""
    if layer.chooser >= 0:
        return "chooser", layer.chooser
    return (layer.cache,) if layer.cache >= 0 else (layer.kind.stack, layer.row)


def _repeats(stacks: Sequence[tuple[Stack, ...]], period: int) -> int:
    """How often the first `period` groups repeat at the start."""
    count = 1
    while stacks[count * period : (count + 1) * period] == stacks[:period]:
        count += 1
    return count


def _each(stack: Any, count: int, *, by_slices: bool) -> list[Any]:
    """The weights of each layer of a stack [count, ...]; a stack for count 1 has no such dimension.

    By a split: the gradient of each slice would be padded, and padded gradients added. by_slices: under
    `vmap`, where gradients that are partial sums cannot be joined again (jax 0.10.2: an error on
    `spec[...]`).
    """
    if count == 1:
        return [stack]
    leaves, structure = jax.tree.flatten(stack)

    def cut(leaf: Array) -> list[Array]:
        if by_slices:
            return [leaf[number] for number in range(count)]
        return [lax.squeeze(one, (0,)) for one in lax.split(leaf, (1,) * count)]

    return [jax.tree.unflatten(structure, own) for own in zip(*map(cut, leaves), strict=True)]


def _periods(part: Any, each: int, times: int) -> Any:
    """A part [n, ...] of a stack as [times, each, ...], or as [times, ...] if `each` is 1."""

    def cut(w: Array) -> Array:
        if each == 1:
            return w
        spec = jax.typeof(w).sharding.spec
        split = PartitionSpec(None, None, *spec.partitions[1:], reduced=spec.reduced)
        return jnp.reshape(w, (times, each, *w.shape[1:]), out_sharding=split)

    return jax.tree.map(cut, part)
