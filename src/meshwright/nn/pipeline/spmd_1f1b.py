"""The training step of a pipeline under SPMD 1F1B: one program that runs the same ticks on all stages.

Arrays of the stages have a leading dimension, split over `pipe`: weights [p, n, ...] of n layers each,
activations [p, B, T, D]. The pass of all stages is `vmap` of one stage's pass over that dimension, so layers
are computed as they are without a pipeline, and hops are permutes along it. Embedding and head are outside
the `vmap`: their vocabulary is split over `pipe`, too.

    forward tick   x[0] = enter(tokens of the next microbatch); y = stages(x); hop to the right
    head           from y[p - 1]: the loss, and the cotangent that the last stage starts from
    backward tick  hop to the left; dx, dw from the residuals of the same microbatch's forward pass

A tick with both passes overlaps the hop to the left with the forward pass, the other with the backward pass.

The residuals of a forward pass, as the remat policy selects them, wait in a ring of 2p - 1 slots: at most
that many ticks pass until the backward pass. The ring is on the devices, or in the host's memory, from where
each slot is copied whole. It holds no weights. In an idle tick a stage computes on the residuals of another
tick: its cotangents are zeros, and so are the gradients that it adds.

Tried and dropped (jax 0.10.2): `shard_map` over `pipe` only. It gathers every weight over the other axes at
its boundary, unless all is wrapped in `auto_axes`, which drops the axes that gradients are partial sums over.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.moves.attention import token_sharding
from meshwright.layout.rules import STAGES
from meshwright.models import transformer
from meshwright.models.at_layer import Places
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import STACK_LETTERS
from meshwright.models.scopes import BACKWARD
from meshwright.nn.each_device import partitions_of
from meshwright.nn.gradients import Scattered, added, as_used, zeros
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.params import build, flatten, merged_params, trained
from meshwright.nn.start.device_mesh import partition_spec

# (tokens[B, T], targets[B, T], places) of the rows[B, T + 1] of a microbatch.
Deal = Callable[[Array], tuple[Array, Array, Places]]
# The scope of forward work outside of JAX's own differentiation: the audit reads passes off names.
FORWARD = "forward"


class _Forward(NamedTuple):
    """State between forward ticks: the stages' next inputs [p, B, T, D] and the ring of residuals.

    of_routers: the losses so far of each stage's routers, [p, 2]; None if they are not counted.
    """

    arrived: Array
    ring: Any
    of_routers: Any


class _Backward(NamedTuple):
    """State between backward ticks: the cotangents dx[p, B, T, D], the gradients so far and the loss."""

    d_x: Array
    d_ends: Any
    d_layers: Any
    loss: Array


class SpmdPipeline:
    """Loss and gradients of one step, for a model under a layout with schedule `lanes`.

    rows[m, B, T + 1]: of the microbatches. share: weight of one microbatch's loss in the loss of the step.
    router_weights: weights of the routers' losses, f32[2], if `ops` has such losses.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        params: Mapping[str, Any],
        leaves: Mapping[str, Any],
        rows: Array,
        deal: Deal,
        share: Any,
        ops: JaxOps,
        router_weights: Any = None,
    ) -> None:
        self.config, self.layout = config, layout
        self.rows, self.deal, self.share, self.router_weights = rows, deal, share, router_weights
        self.stages, self.microbatches = layout.pipe, layout.schedule.microbatches
        self.ops = ops
        self.places: Places | None = None  # of all microbatches; None if documents are masked
        if ops.masked:
            self._rows_of_stages = _on_all(rows, layout.pipe)
        else:
            # Split once, rather than by every layer of every tick, and for `enter` out of the loops, too: XLA
            # would split a loop's carry as its first use, and gather it for the others.
            first = rows[0]
            self.places = _split_as(jax.typeof(first).sharding.spec, deal(first)[2])
            self.entering = _split_as(partition_spec(token_sharding(layout, "tokens")), self.places)
        used = as_used(config, layout, params, leaves)
        self.ends, stacks = _parts(used)
        self.types = jax.tree.map(_type_within, self._differentiated(stacks))
        self.layers = jax.tree.map(self._dealt, stacks)
        self.zeros = zeros(config, layout, leaves)
        each = config.num_layers // layout.pipe
        self._own_layers = [
            config.layers[first : first + each] for first in range(0, config.num_layers, each)
        ]
        # One stage's backward pass: the structure of its residuals, and the inputs and constants among them.
        self._vjp: Any = None
        self._inputs_saved: dict[int, int] = {}
        self._constants: dict[int, Any] = {}

    # A step

    def losses_and_gradients(self) -> tuple[tuple[Array, Any], Any]:
        """((mean loss of the microbatches, mean losses of the routers), gradients).

        Gradients are sharded as `leaves`: partial sums over axes if `leaves` are typed `reduced` over them.
        """
        p, m = self.stages, self.microbatches
        forward = self._first_tick()
        forward, _ = lax.scan(self._warm_tick, forward, jnp.arange(1, p - 1))
        backward = self._nothing_yet(forward.arrived)
        (forward, backward), _ = lax.scan(self._both_tick, (forward, backward), jnp.arange(p - 1, p - 1 + m))
        drain = partial(self._last_tick, forward.ring)
        backward, _ = lax.scan(drain, backward, jnp.arange(p - 1 + m, m + 2 * (p - 1)))
        gradients = {**backward.d_ends, **jax.tree.map(_joined, backward.d_layers)}
        of_routers = forward.of_routers
        if of_routers is not None:
            of_routers = lax.reduce_sum(of_routers, (0,), out_sharding=PartitionSpec(None)) / m
        return (backward.loss, of_routers), gradients

    def loss(self) -> Array:
        """The mean loss of the microbatches, without gradients or routers' losses."""
        p, m = self.stages, self.microbatches

        def tick(arrived: Array, t: Array) -> tuple[Array, Array]:
            y, _, _ = self._forward(arrived, t)
            ends = self.ops.reads(self.ends)
            return _hop(y), self._head(ends, _of_last(y), self._batch(t - (p - 1))[1])

        def warm(arrived: Array, t: Array) -> tuple[Array, None]:
            return _hop(self._forward(arrived, t)[0]), None

        arrived, _ = lax.scan(warm, self._idle(), jnp.arange(p - 1))
        return jnp.sum(lax.scan(tick, arrived, jnp.arange(p - 1, p - 1 + m))[1])

    # Ticks

    def _first_tick(self) -> _Forward:
        """The forward pass of tick 0, which gives the ring its shape."""
        y, of_routers, saved = self._forward(self._idle(), jnp.int32(0))
        ring = jax.tree.map(lambda leaf: _no_slots(leaf, 2 * self.stages - 1, self._waiting), saved)
        return _Forward(_hop(y), self._kept(ring, saved, jnp.int32(0)), of_routers)

    def _warm_tick(self, before: _Forward, t: Array) -> tuple[_Forward, None]:
        return self._advanced(before, t)[1], None

    def _advanced(self, before: _Forward, t: Array) -> tuple[Array, _Forward]:
        """y[p, B, T, D] of a forward tick, and the state for the next."""
        y, of_routers, saved = self._forward(before.arrived, t)
        total = jax.tree.map(jnp.add, before.of_routers, of_routers)
        return y, _Forward(_hop(y), self._kept(before.ring, saved, t), total)

    def _both_tick(
        self, before: tuple[_Forward, _Backward], t: Array
    ) -> tuple[tuple[_Forward, _Backward], None]:
        y, forward = self._advanced(before[0], t)
        backward = before[1]
        _, targets, _ = self._batch(t - (self.stages - 1))
        read = self.ops.reads(self.ends)
        loss, (d_ends, d_y) = jax.value_and_grad(
            lambda ends, y: self._head({**read, **ends}, y, targets), argnums=(0, 1)
        )(self._trained(read), _of_last(y))
        backward = backward._replace(loss=backward.loss + loss)
        return (forward, self._backward(backward, forward.ring, d_y, t, d_ends)), None

    def _last_tick(self, ring: Any, before: _Backward, t: Array) -> tuple[_Backward, None]:
        spec = PartitionSpec(*jax.typeof(before.d_x).sharding.spec.partitions[1:])
        nothing = jnp.zeros(before.d_x.shape[1:], before.d_x.dtype, out_sharding=spec)
        return self._backward(before, ring, nothing, t), None

    # Passes

    def _forward(self, arrived: Array, t: Array) -> tuple[Array, Any, Any]:
        """(y[p, B, T, D] of all stages, losses of the routers of busy stages, residuals of all stages)."""
        tokens, _, entering = self._batch(jnp.minimum(t, self.microbatches - 1))
        with jax.named_scope(FORWARD):
            x = transformer.enter(self.config, self.ops, self.ops.reads(self.ends), tokens, entering)
        places, of_places = self._places(t - self._numbers())
        run = jax.vmap(
            self._stage_forward, in_axes=(0, 0, None, of_places, 0, None), out_axes=(0, 0, 0, None)
        )
        y, of_routers, saved, constants = run(self.layers, arrived, x, places, self._numbers(), t)
        self._constants = self._constants or constants  # equal in all ticks, so the first tick's serve all
        return y, of_routers, jax.tree.map(_on_stages, saved)

    def _stage_forward(
        self,
        weights: Mapping[str, Any],
        arrived: Array,
        entering: Array,
        places: Places,
        number: Array,
        t: Array,
    ) -> tuple[Array, Any, list[Array], dict[int, Array]]:
        with jax.named_scope(FORWARD), jax.named_scope("x"):
            x = jnp.where(number == 0, entering, arrived)
        diff = jax.tree.map(reshard, self._differentiated(weights), self.types)

        def run(diff: Any, x: Array) -> tuple[Array, Any]:
            w, ops = self._with(weights, diff), self.ops.on_stage(number, self._own_layers)
            with jax.named_scope(FORWARD):
                return transformer.through(self.config, ops, w, x, places, None, self._own_layers[0])

        (y, of_routers), vjp = jax.vjp(run, diff, x)
        if of_routers is not None:
            of_routers = jnp.where(self._has_microbatch(t - number), of_routers, 0)
        saved, self._vjp = jax.tree.flatten(vjp)
        known = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves((weights, diff, places)))}
        self._inputs_saved = {n: known[id(leaf)] for n, leaf in enumerate(saved) if id(leaf) in known}
        # An array without a mesh, such as a window, is equal on all stages and in all ticks.
        constants = {n: leaf for n, leaf in enumerate(saved) if jax.typeof(leaf).sharding.mesh.empty}
        here = [leaf for n, leaf in enumerate(saved) if n not in {*self._inputs_saved, *constants}]
        return y, of_routers, here, constants

    def _has_microbatch(self, number: Array) -> Array:
        return (number >= 0) & (number < self.microbatches)

    def _backward(self, before: _Backward, ring: Any, d_y: Array, t: Array, d_head: Any = None) -> _Backward:
        """All stages' backward passes, from the residuals of the same microbatch's forward pass.

        d_head: the gradients of the weights that the head of the same tick read: a tied table's two are added
        before they are scattered.
        """
        ticks = t - 2 * (self.stages - 1 - self._numbers())  # of the forward passes
        slots = jnp.clip(ticks, 0, self.microbatches + self.stages - 2)
        saved = jax.tree.map(lambda leaf: self._back(_slots(leaf, slots % (2 * self.stages - 1))), ring)
        places, of_places = self._places(ticks - self._numbers())
        run = jax.vmap(self._stage_backward, in_axes=(0, 0, 0, None, of_places, 0, None))
        (arrived,) = _transposed(_hop, before.d_x, before.d_x)
        d_layers, d_x = run(self.layers, saved, arrived, d_y, places, self._numbers(), t)
        (d_first,) = _transposed(partial(_on_first, num_stages=self.stages), d_y, d_x)
        tokens, _, entering = self._batch(jnp.clip(t - 2 * (self.stages - 1), 0, self.microbatches - 1))

        def reads(diff: Any) -> tuple[Any, Any]:
            ends = self.ops.reads(self._with(self.ends, diff))
            return self._trained(ends), ends

        ends, read, whole = jax.vjp(reads, self._differentiated(self.ends), has_aux=True)
        _, entered = jax.vjp(
            lambda ends: transformer.enter(self.config, self.ops, {**whole, **ends}, tokens, entering), ends
        )
        (d_read,) = entered(d_first)
        if d_head is not None:
            with jax.named_scope(BACKWARD):
                d_read = jax.tree.map(jnp.add, d_head, d_read)
        (d_ends,) = read(d_read)
        return before._replace(
            d_x=d_x, d_layers=added(before.d_layers, d_layers), d_ends=added(before.d_ends, d_ends)
        )

    def _stage_backward(
        self,
        weights: Mapping[str, Any],
        saved: list[Array],
        arrived: Array,
        leaving: Array,
        places: Places,
        number: Array,
        t: Array,
    ) -> tuple[Any, Array]:
        diff = jax.tree.map(reshard, self._differentiated(weights), self.types)
        known, rest = jax.tree.leaves((weights, diff, places)), iter(saved)
        known_here = self._constants | {n: known[place] for n, place in self._inputs_saved.items()}
        leaves = [known_here[n] if n in known_here else next(rest) for n in range(self._vjp.num_leaves)]
        with jax.named_scope(BACKWARD), jax.named_scope("x"):
            d_y = jnp.where(number == self.stages - 1, leaving, arrived)
        d_routers = self.router_weights
        if d_routers is not None:
            is_idle = ~self._has_microbatch(t - 2 * (self.stages - 1) + number)
            d_routers = jnp.where(is_idle, 0, jnp.asarray(d_routers) / self.microbatches)
        d_weights, d_x = jax.tree.unflatten(self._vjp, leaves)((d_y, d_routers))
        return jax.tree.map(lambda d: _of_stage(d, number), d_weights), d_x

    def _head(self, ends: Mapping[str, Any], x: Array, targets: Array) -> Array:
        """A microbatch's share of the loss. ends: as they are read."""
        return transformer.leave_with_loss(self.config, self.ops, ends, x, targets) * self.share

    # Microbatches

    def _batch(self, number: Array) -> tuple[Array, Array, Places]:
        """Tokens and targets [B, T] of microbatch `number`, and its places for `enter`."""
        tokens, targets, places = self.deal(self.rows[number])
        return tokens, targets, places if self.places is None else self.entering

    def _places(self, numbers: Array) -> tuple[Places, int | None]:
        """The places of each stage's microbatch, and their dimension of stages, for `vmap`.

        A stage without a microbatch gets the places of another.
        """
        if self.places is not None:
            return self.places, None
        rows = _slots(self._rows_of_stages, jnp.clip(numbers, 0, self.microbatches - 1))
        _, _, places = jax.vmap(self.deal)(rows)
        return _split_as(jax.typeof(rows).sharding.spec, places), 0

    # Arrays split over stages

    def _dealt(self, stacked: Array) -> Array:
        """A stack [L, ...] as [p, L/p, ...]; `_type_within` types its cotangent, within a stage."""
        spec = jax.typeof(stacked).sharding.spec
        shape = (self.stages, stacked.shape[0] // self.stages, *stacked.shape[1:])
        split = PartitionSpec(STAGES, None, *spec.partitions[1:], unreduced=spec.unreduced)
        plain = reshard(stacked, PartitionSpec(*spec.partitions, unreduced=spec.unreduced))
        return jnp.reshape(plain, shape, out_sharding=split)

    def _numbers(self) -> Array:
        return reshard(jnp.arange(self.stages), PartitionSpec(STAGES))

    def _idle(self) -> Array:
        """x[p, B, T, D] of no microbatch."""
        _, batch, length = self.rows.shape
        spec = PartitionSpec(STAGES, *partition_spec(self.layout.activation("x", "BTD")).partitions)
        shape = (self.stages, batch, length - 1, self.config.d_model)
        return jnp.zeros(shape, self.ops.dtype, out_sharding=spec)

    def _nothing_yet(self, like: Array) -> _Backward:
        ends, stacks = _parts(self.zeros)
        return _Backward(jnp.zeros_like(like), ends, jax.tree.map(self._dealt, stacks), jnp.zeros(()))

    def _kept(self, ring: Any, saved: object, t: Array) -> Any:
        def put(ring: Array, leaf: Array) -> Array:
            return lax.dynamic_update_index_in_dim(ring, self._waiting(leaf), t % (2 * self.stages - 1), 0)

        return jax.tree.map(put, ring, saved)

    def _waiting(self, x: Array) -> Array:
        """x in the memory of the ring."""
        return jax.device_put(x, jax.memory.Space.Host) if self.layout.schedule.offload else x

    def _back(self, x: Array) -> Array:
        return jax.device_put(x, jax.memory.Space.Device) if self.layout.schedule.offload else x

    # Weights: some are differentiated by their shards (nn/gradients.py), some are not trained

    def _trained(self, weights: Mapping[str, Any]) -> Any:
        """The weights that training changes."""
        flat = flatten(weights)
        return build(self.config, lambda path, _: flat[path], only=trained(self.config) & flat.keys())

    def _differentiated(self, weights: Mapping[str, Any]) -> Any:
        """The arrays that gradients are taken of: weights, or shards of scattered weights."""
        return jax.tree.map(
            lambda w: w.shard if _is_scattered(w) else w, self._trained(weights), is_leaf=_is_scattered
        )

    def _with(self, weights: Any, differentiated: Any) -> Any:
        """The weights with their `differentiated` arrays replaced."""

        def summed(weight: Any, shard: Array) -> Any:
            return replace(weight, shard=shard) if _is_scattered(weight) else shard

        gradients = jax.tree.map(summed, self._trained(weights), differentiated, is_leaf=_is_scattered)
        return merged_params(self.config, weights, gradients)


def _parts(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters outside of the layers, and the stacks of layers."""
    stacks = {name: node for name, node in tree.items() if name in STACK_LETTERS}
    return {name: node for name, node in tree.items() if name not in stacks}, stacks


def _is_scattered(weight: Any) -> bool:
    return isinstance(weight, Scattered)


def _split_as(spec: PartitionSpec, places: Places) -> Places:
    return jax.tree.map(lambda x: reshard(x, spec), places)


# Arrays [p, ...] of all stages


def _type_within(stacked: Array) -> PartitionSpec:
    """The type of one stage's share of a stack of all layers."""
    spec = jax.typeof(stacked).sharding.spec
    return PartitionSpec(None, *spec.partitions[1:], reduced=spec.reduced)


def _on_stages(x: Array) -> Array:
    """Residuals [p, ...], split over stages; `vmap` leaves those equal on all stages replicated."""
    spec = jax.typeof(x).sharding.spec
    return reshard(x, PartitionSpec(STAGES, *spec.partitions[1:]))


@custom_vmap
def _of_stage(gradient: Array, number: Array) -> Array:
    """A gradient that `vmap` stacks over the stages, also of a weight that has none: zeros on all.

    `vmap` by itself cannot repeat a partial sum (jax 0.10.2, an error on `unreduced`). number: of the stage.
    """
    return gradient


@_of_stage.def_vmap
def _stacked(num_stages: int, mapped: list[bool], gradient: Array, number: Array) -> tuple[Array, bool]:
    if mapped[0]:
        return gradient, True
    spec = jax.typeof(gradient).sharding.spec
    split = PartitionSpec(STAGES, *spec.partitions, unreduced=spec.unreduced)
    shape, dims = (num_stages, *gradient.shape), range(1, gradient.ndim + 1)
    return lax.broadcast_in_dim(gradient, shape, dims, out_sharding=split), True


def _joined(x: Array) -> Array:
    """[p, n, ...] as [L, ...]."""
    spec = jax.typeof(x).sharding.spec
    split = PartitionSpec(STAGES, *spec.partitions[2:], unreduced=spec.unreduced)
    return jnp.reshape(x, (-1, *x.shape[2:]), out_sharding=split)


def _no_slots(x: Array, num_slots: int, waiting: Callable[[Array], Array]) -> Array:
    """A ring [slots, p, ...] of zeros for arrays like x, made in its own memory rather than moved to it."""
    split = PartitionSpec(None, *partitions_of(x))
    return lax.broadcast(waiting(jnp.zeros((), x.dtype)), (num_slots, *x.shape), out_sharding=split)


def _on_all(x: Array, num_stages: int) -> Array:
    """x[n, ...] as [n, p, ...], with all of it on every stage."""
    spec = jax.typeof(x).sharding.spec
    split = PartitionSpec(spec[0], STAGES, *spec.partitions[1:])
    return jnp.broadcast_to(x[:, None], (x.shape[0], num_stages, *x.shape[1:]), out_sharding=split)


def _slots(ring: Array, slots: Array) -> Array:
    """[p, ...]: of every stage its own slot of the ring [slots, p, ...]."""
    spec = jax.typeof(ring).sharding.spec

    def local(ring_local: Array, slot_local: Array) -> Array:
        return lax.dynamic_index_in_dim(ring_local, slot_local[0], 0, keepdims=False)

    out = PartitionSpec(*spec.partitions[1:])
    return jax.shard_map(local, in_specs=(spec, PartitionSpec(STAGES)), out_specs=out)(ring, slots)


def _hop(x: Array) -> Array:
    """x[p, ...] of the stage before; zeros on the first."""
    spec = jax.typeof(x).sharding.spec
    pairs = [(stage, stage + 1) for stage in range(x.shape[0] - 1)]
    sent = partial(lax.ppermute, axis_name=STAGES, perm=pairs)
    with jax.named_scope(FORWARD), jax.named_scope("x"):
        return jax.shard_map(sent, in_specs=spec, out_specs=spec)(x)


def _on_first(x: Array, num_stages: int) -> Array:
    """[p, ...] with x on the first stage, and zeros on the others."""
    split = PartitionSpec(STAGES, *partitions_of(x))
    with jax.named_scope("enter"):
        wide = jnp.broadcast_to(x[None], (num_stages, *x.shape), out_sharding=split)
        return jnp.where(_stage_of(wide) == 0, wide, 0)


def _of_last(x: Array) -> Array:
    """x[p - 1] of x[p, ...], on all stages: a sum with zeros for all other stages."""
    spec = jax.typeof(x).sharding.spec
    with jax.named_scope(FORWARD), jax.named_scope("leave"):
        mine = jnp.where(_stage_of(x) == x.shape[0] - 1, x, 0)
        return lax.reduce_sum(mine, (0,), out_sharding=PartitionSpec(*spec.partitions[1:]))


def _stage_of(x: Array) -> Array:
    """The stage at each place of x[p, ...]."""
    return lax.broadcasted_iota(jnp.int32, x.shape, 0, out_sharding=jax.typeof(x).sharding.spec)


def _transposed(linear: Callable[[Array], Array], like: Array, cotangent: Array) -> tuple[Array]:
    """The transpose of a linear function of arrays like `like`, with the names of JAX's own transposes."""
    return jax.vjp(linear, like)[1](cotangent)
