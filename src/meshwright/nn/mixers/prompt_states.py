"""States after prompts whose positions are split: all devices compute them, one replica keeps each.

    state    f32[B_data·context, g_tensor, u, s, p]: the entries of all replicas that share the prompts

Each device has pieces of every prompt (pieces.py). It knows the states after all pieces, and the replica that
generates the sequence writes them to its slot. Of the last inputs of a convolution a device has some or none;
an all-reduce, to which it gives zeros for the others, sends all of them to every device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.nn.each_device import each_device, spec_of
from meshwright.nn.mixers.pieces import Pieces
from meshwright.nn.mixers.recurrence import Inputs, over_prompts
from meshwright.nn.mixers.state_cache import plain
from meshwright.nn.norms import along
from meshwright.notation.einsum import Reshard


@dataclass(frozen=True)
class PromptStates:
    """The states of all layers, and the places of prompts [B, T] in them.

    positions i32[B, T], whole over T, as devices have them. lengths i32[B]: of the prompts without padding.
    slots i32[B]: of each prompt, on the shard that keeps it. is_own bool[rows of all shards]: whether any
    replica of the shard keeps the prompt of a row; split as the states' entries.
    """

    states: Mapping[str, Sequence[Array]]
    positions: Array
    lengths: Array
    slots: Array
    is_own: Array

    def recurrence(
        self, number: int, name: str, inputs: Inputs, pieces: Pieces, to_all: Reshard
    ) -> tuple[Array, "PromptStates"]:
        """o[B, T, ...] like v of inputs [B, T, ...], and the cache after the prompts."""
        inputs = Inputs.of({kind: plain(x) for kind, x in inputs.present.items()})
        split = PartitionSpec(*spec_of(inputs.k).partitions[:2])
        is_token = reshard(self.positions < self.lengths[:, None], split)

        def without_padding(x: Array) -> Array:
            return jnp.where(along(x, is_token, (0, 1)), x, jnp.zeros((), x.dtype))

        # Padding neither decays the state nor adds to it.
        inputs = inputs._replace(k=without_padding(inputs.k), decay=without_padding(inputs.decay))
        out, after = over_prompts(inputs, pieces, to_all)
        return out, self._written(number, name, after)

    def with_last_inputs(self, number: int, memory: str, x: Array, pieces: Pieces) -> "PromptStates":
        """The cache with the last of the inputs x[B, T, ...] of each prompt."""
        num_kept = self.states[memory][number].shape[-1]

        def local(x: Array, lengths: Array) -> Array:
            places = lengths[:, None] - num_kept + jnp.arange(num_kept, dtype=lengths.dtype)[None]
            last = jnp.zeros((*places.shape, *x.shape[2:]), x.dtype)
            cut, numbers = pieces.cut_local(x), pieces.numbers_local()
            for piece in range(pieces.num_local):
                is_here = (places >= 0) & (places // pieces.length == numbers[piece])
                read = jnp.take_along_axis(cut[:, piece], _like(places % pieces.length, x), axis=1)
                last += jnp.where(_like(is_here, x), read, jnp.zeros((), x.dtype))
            return jnp.moveaxis(lax.psum(last, pieces.axes), 1, -1)

        parts = spec_of(x).partitions
        specs = [PartitionSpec(*parts), PartitionSpec(parts[0])]
        of_last = PartitionSpec(parts[0], *parts[2:], None)
        last = each_device(local, specs, of_last)(plain(x), self.lengths)
        return self._written(number, memory, last)

    def _written(self, number: int, name: str, new: Array) -> "PromptStates":
        """The cache with new[B, ...] in the slots of the prompts that a replica keeps."""

        def local(state: Array, new: Array, slots: Array, is_own: Array) -> Array:
            entries = jnp.where(is_own, slots, len(state))
            new = jnp.reshape(new, (len(new), *state.shape[1:])).astype(state.dtype)
            return state.at[entries].set(new, mode="drop")

        layers = list(self.states[name])
        given = layers[number], new, self.slots, self.is_own
        specs = [spec_of(x) for x in given]
        layers[number] = each_device(local, specs, specs[0])(*given)
        return replace(self, states={**self.states, name: layers})


def _like(of_positions: Array, x: Array) -> Array:
    """of_positions[B, t] with the number of dimensions of x[B, T, ...]."""
    return of_positions.reshape(*of_positions.shape, *[1] * (x.ndim - 2))
