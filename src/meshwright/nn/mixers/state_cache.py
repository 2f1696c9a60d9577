"""States of running sequences, an array a layer for each state of its mixer, updated in place by a step.

    state    f32[B_data, g_tensor, u, s, p], and conv_q[B_data, g_tensor, s, t] and others: B slots

A sequence has the slot that it generates in. A step has rows of consecutive tokens; a row of one token is
computed in the recurrent form, a longer row in chunks. Rows of one sequence follow each other, and each
begins with the state after the row before. A sequence that begins at position 0 begins without a state, so
a slot needs no clearing, and a preempted sequence is computed again. The slot after a replica's last belongs
to no sequence: padding rows read and write it.

A row that verifies drafts writes the state after each of its tokens, after the first to its slot and after
each draft to an entry for that (`layout.paged.num_state_entries`). The next row of the sequence reads the
entry of the last draft that was right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.count import state_arrays, state_variants
from meshwright.models.parameters import dimensions
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.attention.compression import weighed
from meshwright.nn.attention.paged import Rows
from meshwright.nn.each_device import each_device, spec_of
from meshwright.nn.mixers.recurrence import Inputs, chunked, rates_of
from meshwright.nn.start.device_mesh import array_type


@dataclass(frozen=True)
class StateCache:
    """The states of all layers, and the places of a step's tokens.

    positions i32[N]: of each token in its sequence, negative for padding. slots i32[N]: for the first token
    of each row, the entry that it reads. Both are split as the batch. rows: of each replica. num_replicas: of
    a shard of the batch. num_slots: of a replica. num_drafts: entries of each slot for states after drafts.
    """

    states: Mapping[str, Sequence[Array]]
    positions: Array
    slots: Array
    rows: tuple[Rows, ...]
    num_replicas: int
    num_slots: int
    num_drafts: int = 0

    def convolved(self, number: int, memory: str, x: Array, taps: Array) -> tuple[Array, "StateCache"]:
        """y like x[N, ...] by taps[..., c], with the inputs before each row, and the cache after it."""
        return self._updated(number, memory, _convolved, x, constants=(taps,))

    def recurrence(self, number: int, name: str, inputs: Inputs) -> tuple[Array, "StateCache"]:
        """o[N, ...] like v of inputs [N, ...], and the cache after them."""
        given = inputs.present
        rates = given.pop("log_rates", None)
        # The result is like the first array.
        names = sorted(given, key=lambda kind: kind != "v")
        arrays, constants = [given[kind] for kind in names], [] if rates is None else [rates]
        return self._updated(number, name, partial(_recurrent, names), *arrays, constants=constants)

    def compressed(
        self, number: int, name: str, values: Array, gates: Array, bias: Array
    ) -> tuple[Array, "StateCache"]:
        """The entry that ends at each token, [N, H], of the values and gates [N, c, H], and the cache.

        Its numbers are meaningless at tokens that are not the last of an entry.
        """
        inputs = jnp.concatenate([plain(values), plain(gates)], axis=-1)
        out, cache = self._updated(number, f"{name}_inputs", _compressed, inputs, constants=(bias,))
        return out[:, 0], cache

    def _updated(
        self,
        number: int,
        name: str,
        of_rows: Callable[..., tuple[Array, Array]],
        *arrays: Array,
        constants: Sequence[Array] = (),
    ) -> tuple[Array, "StateCache"]:
        """The result of `of_rows` for all rows, like the first array, and the cache with the new states."""
        arrays = tuple(plain(x) for x in arrays)
        num_arrays = len(arrays)

        def local(state: Array, positions: Array, slots: Array, *blocks: Array) -> tuple[Array, Array]:
            of_tokens, fixed = blocks[:num_arrays], blocks[num_arrays:]
            results, start = [], 0
            for rows in self.rows:
                places = self._places(
                    rows, self._cut(rows, start, positions), self._cut(rows, start, slots)[:, 0], len(state)
                )
                out, state = of_rows(
                    state, places, *(self._cut(rows, start, block) for block in of_tokens), *fixed
                )
                results.append(jnp.reshape(out, (self.num_replicas, rows.num_tokens, *out.shape[2:])))
                start += rows.num_tokens
            out = jnp.concatenate(results, axis=1)
            return jnp.reshape(out, (-1, *out.shape[2:])), state

        layers = list(self.states[name])
        given = layers[number], self.positions, self.slots, *arrays, *constants
        specs = [spec_of(x) for x in given]
        out, layers[number] = each_device(local, specs, (specs[3], specs[0]))(*given)
        return out, replace(self, states={**self.states, name: layers})

    def _places(self, rows: Rows, positions: Array, read: Array, num_entries: int) -> "StatePlaces":
        """The places of rows [R, Q], among the entries of all replicas of a shard."""
        slots, after_drafts = read, None
        if self.num_drafts:
            of_replica = num_entries // self.num_replicas
            first_draft = of_replica - self.num_slots * self.num_drafts
            number = read % of_replica
            slot = jnp.where(number < first_draft, number, (number - first_draft) // self.num_drafts)
            slots = read - number + slot
            if rows.verifies:
                entry = slots - slot + first_draft + slot * self.num_drafts  # of the slot's first draft
                entries = entry[:, None] + jnp.arange(rows.length - 1, dtype=entry.dtype)[None]
                after_drafts = jnp.where((slot < self.num_slots)[:, None], entries, num_entries)
        first = positions[:, 0]
        goes_on = (first[1:] > 0) & (slots[1:] == slots[:-1]) & (first[1:] == positions[:-1, -1] + 1)
        no = jnp.zeros(1, bool)
        written = jnp.where(jnp.concatenate([goes_on, no]), num_entries, slots)
        return StatePlaces(
            positions,
            read,
            slots,
            jnp.concatenate([no, goes_on]),
            slots if rows.length == 1 else written,
            after_drafts,
        )

    def _cut(self, rows: Rows, start: int, x: Array) -> Array:
        """The tokens of these rows of every replica, [R, Q, ...] of x[N, ...]."""
        by_replica = jnp.reshape(x, (self.num_replicas, -1, *x.shape[1:]))
        part = by_replica[:, start : start + rows.num_tokens]
        return jnp.reshape(part, (-1, rows.length, *x.shape[1:]))


class StatePlaces(NamedTuple):
    """The places of rows: positions i32[R, Q], the entries i32[R] that they read, and their slots i32[R].

    continues: whether the row goes on with the sequence of the row before. written: the slot, or a number out
    of range if the next row continues this one. after_drafts i32[R, Q - 1]: of rows that verify drafts, the
    entries written after each.
    """

    positions: Array
    read: Array
    slots: Array
    continues: Array
    written: Array
    after_drafts: Array | None

    def put(self, state: Array, after: Sequence[Array]) -> Array:
        """The cache's states with each row's after its last token or, if it verifies, after each token."""
        state = state.at[self.written].set(after[0], mode="drop")
        if self.after_drafts is None:
            return state
        return state.at[self.after_drafts].set(jnp.stack(after[1:], axis=1), mode="drop")


def _convolved(state: Array, places: StatePlaces, x: Array, taps: Array) -> tuple[Array, Array]:
    """y like x[R, Q, ...], and the last inputs state[slots, ..., t] of each sequence."""
    num_kept, length = state.shape[-1], x.shape[1]
    begun = _along(places.positions[:, 0] > 0, state)
    before = jnp.moveaxis(jnp.where(begun, state[places.read], jnp.zeros((), state.dtype)), -1, 1)
    if length >= num_kept:
        last = jnp.concatenate([x[:1, -num_kept:], x[:-1, -num_kept:]])
        before = jnp.where(_along(places.continues, x), last.astype(before.dtype), before)
    inputs = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    y = sum(
        inputs[:, tap : tap + length] * taps[..., tap].astype(x.dtype)[None, None]
        for tap in range(taps.shape[-1])
    )
    if places.after_drafts is None:
        counts = jnp.sum(places.positions >= 0, axis=1)
        kept = [jax.vmap(lambda row, count: lax.dynamic_slice_in_dim(row, count, num_kept))(inputs, counts)]
    else:
        kept = [inputs[:, end : end + num_kept] for end in range(1, length + 1)]
    after = [jnp.moveaxis(last, 1, -1).astype(state.dtype) for last in kept]
    return jnp.asarray(y, x.dtype), places.put(state, after)


def _compressed(state: Array, places: StatePlaces, x: Array, bias: Array) -> tuple[Array, Array]:
    """Entries [R, Q, 1, H], each at its last token, of the values and gates in x[R, Q, c, 2H], and the state.

    The state is the last inputs of each sequence. bias[w, c, H]: see nn/attention/compression.py. Rows of
    several tokens run in a loop: the state after a short row also keeps inputs of the rows before.
    """
    rate, num_kept, length = bias.shape[0], state.shape[1], x.shape[1]
    count = -(-length // rate)

    def of_row(before: Array, positions: Array, x: Array) -> tuple[Array, Array]:
        """The row's entries, and its inputs after those in the state."""
        inputs = jnp.concatenate([before, x.astype(before.dtype)])
        last = (rate - 1 - positions[0]) % rate + rate * jnp.arange(count, dtype=jnp.int32)
        first = positions[0] + last + 1 - rate
        starts = num_kept + last + 1 - rate
        current, earlier = (
            inputs[jnp.clip(begin[:, None] + jnp.arange(rate, dtype=jnp.int32)[None], 0, len(inputs) - 1)]
            for begin in (starts, starts - rate)
        )
        (v, g), (v_before, g_before) = (jnp.split(part, 2, axis=-1) for part in (current, earlier))
        entries = weighed((v, v_before), (g, g_before), bias, first >= rate)
        out = jnp.zeros((length, entries.shape[-1]), entries.dtype).at[last].set(entries, mode="drop")
        return out.astype(x.dtype), inputs

    def before(state: Array, read: Array, positions: Array) -> Array:
        return jnp.where(positions[0] > 0, state[read], jnp.zeros((), state.dtype))

    if length == 1 or places.after_drafts is not None:
        begun = jax.vmap(partial(before, state))(places.read, places.positions)
        out, inputs = jax.vmap(of_row)(begun, places.positions, x)
        after = [inputs[:, end : end + num_kept] for end in range(1, length + 1)]
        return out[:, :, None], places.put(state, after)

    def row(state: Array, given: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        read, slot, positions, x = given
        out, inputs = of_row(before(state, read, positions), positions, x)
        after = lax.dynamic_slice_in_dim(inputs, jnp.sum(positions >= 0), num_kept)
        return state.at[slot].set(after), out

    state, out = lax.scan(row, state, (places.read, places.slots, places.positions, x))
    return out[:, :, None], state


def _recurrent(
    names: Sequence[str], state: Array, places: StatePlaces, *arrays: Array
) -> tuple[Array, Array]:
    """o like v[R, Q, (g), u, p], and the states[entries, (g), u, s, p], without s and p if they are 1.

    arrays: the Inputs of these names, and perhaps log_rates.
    """
    inputs = Inputs.of(dict(zip((*names, "log_rates"), arrays, strict=False)))
    if left_out := inputs.v.ndim - state.ndim:
        whole = jnp.reshape(state, (*state.shape, *[1] * left_out))
        out, after = _recurrent(names, whole, places, *arrays)
        return out, jnp.reshape(after, state.shape)
    log_rates, inputs, length = inputs.log_rates, inputs._replace(log_rates=None), inputs.v.shape[1]
    if length == 1 or places.after_drafts is not None:
        after = jnp.where(_along(places.positions[:, 0] > 0, state), state[places.read], 0.0)
        results, states = list[Array](), list[Array]()
        for token in range(length):
            of_token = jax.tree.map(lambda x, i=token: x[:, i : i + 1], inputs)
            out, after = _stepped(of_token._replace(log_rates=log_rates), after)
            results.append(out)
            states.append(after)
        return jnp.concatenate(results, axis=1), places.put(state, states)

    def row(states: Array, given: tuple[Array, Array, Array, Inputs]) -> tuple[Array, Array]:
        read, slot, positions, inputs = given
        before = jnp.where(positions[0] > 0, states[read], 0.0)
        is_token = positions >= 0
        # Padding neither decays the state nor adds to it.
        inputs = inputs._replace(
            k=jnp.where(_along(is_token, inputs.k), inputs.k, jnp.zeros((), inputs.k.dtype)),
            decay=jnp.where(_along(is_token, inputs.decay), inputs.decay, jnp.zeros((), inputs.decay.dtype)),
        )
        inputs = jax.tree.map(lambda x: x[None], inputs)._replace(log_rates=log_rates)
        out, after = chunked(inputs, state=before[None])
        return states.at[slot].set(after[0]), out[0]

    state, out = lax.scan(row, state, (places.read, places.slots, places.positions, inputs))
    return out, state


def _stepped(inputs: Inputs, state: Array) -> tuple[Array, Array]:
    """(o like v[R, 1, (g), u, p], the states after it) of one token a row."""
    wide = [None if x is None else x[:, 0].astype(jnp.float32) for x in inputs[:5]]
    q, k, v, decay, beta = wide
    assert q is not None and k is not None and v is not None and decay is not None, "only beta may be None"
    spec = "...s,...usp->...up"
    if inputs.log_rates is not None:
        decay = decay[..., None] * rates_of(inputs.log_rates)[None]
    state = state * jnp.exp(decay if decay.ndim == state.ndim - 1 else decay[..., None])[..., None]
    if beta is not None:
        v = beta[..., None] * (v - jnp.einsum(spec, k, state))
    state = state + k[..., None, :, None] * v[..., None, :]
    return jnp.einsum(spec, q, state)[:, None].astype(inputs.v.dtype), state


def abstract_states(config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, num_slots: int) -> Any:
    """The types of the states of all layers, by name; None for layers without a state of this name."""
    of_layers = [config.at(variant) for variant in state_variants(config)]
    kept = [state_arrays(one, layout.precision.compute_dtype) for one in of_layers]

    def state(name: str, of_layer: ModelConfig, arrays: Mapping[str, tuple[str, str]]) -> Any:
        if name not in arrays:
            return None
        letters, dtype = arrays[name]
        sizes = {**dimensions(of_layer), "B": num_slots}
        return array_type(layout.activation(name, letters), mesh, sizes, jax_dtype(dtype))

    names = dict.fromkeys(name for arrays in kept for name in arrays)
    return {
        name: [state(name, one, arrays) for one, arrays in zip(of_layers, kept, strict=True)]
        for name in names
    }


def plain(x: Array) -> Array:
    """x, which no cotangents will be summed for."""
    return reshard(x, PartitionSpec(*spec_of(x).partitions))


def _along(of_rows: Array, x: Array) -> Array:
    """of_rows[R] as [R, 1, ...], to choose rows of x[R, ...]."""
    return jnp.reshape(of_rows, (-1, *[1] * (x.ndim - 1)))
