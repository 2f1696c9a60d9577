"""Mixers with a state in JAX: elementwise functions, convolutions and recurrences."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from meshwright.layout.moves.attention import shared_by_heads, token_sharding
from meshwright.layout.moves.states import all_positions, gathered_states
from meshwright.models.at_layer import AtLayer, Places
from meshwright.nn.each_device import KEPT, axes_of, own_copies, partitions_of, spec_of
from meshwright.nn.mixers.convolution import convolved, convolved_pieces
from meshwright.nn.mixers.elementwise import apply, unit_inputs
from meshwright.nn.mixers.pieces import Pieces
from meshwright.nn.mixers.recurrence import Inputs, over_pieces, recurrence
from meshwright.nn.norms import along
from meshwright.nn.ops.products import ProductOps
from meshwright.nn.products.execute import apply_reshard
from meshwright.nn.remat import MATMUL, OPERATION
from meshwright.nn.stack import KindInLoop
from meshwright.nn.start.device_mesh import partition_spec


def letters_of_states(v: Array) -> str:
    """Letters of the states of a sequence's pieces, T, for values v[B, T, (g), u, p] or [B, T, u]."""
    return "BTgusp" if v.ndim == 5 else "BTusp"


class MixerOps(ProductOps):
    """The operations of `models/mixers/`. Call under `jax.set_mesh`."""

    def apply(
        self, name: str, function: str, spec: str, *operands: Array, normed: str = "", **constants: object
    ) -> Array:
        given, _, letters = spec.partition("->")
        axes = tuple(letters.index(letter) for letter in normed)
        first = operands[0]

        def whole(operand: Array, of_operand: str) -> Array:
            if of_operand == letters:
                return operand
            dims = tuple(letters.index(letter) for letter in of_operand)
            vector = operand if of_operand.startswith("BT") else self._split_as(first, dims, operand)
            return along(first, vector, dims)

        with jax.named_scope(name):
            arrays = [whole(*pair) for pair in zip(operands, given.split(","), strict=True)]
            return checkpoint_name(apply(function, *arrays, axes=axes, **constants), OPERATION)

    def slopes(self, name: str, v: Array, kind: KindInLoop) -> Array:
        spec, num_heads = spec_of(v).partitions[:4], v.shape[2] * v.shape[3]
        with jax.named_scope(name):
            by_head = jnp.asarray([2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)])
            factor = kind.choose([jnp.float32(one.slope) for one in kind.among])
            slopes = jnp.reshape(-by_head.astype(jnp.float32) * factor, (1, 1, *v.shape[2:4]))
            return jnp.broadcast_to(slopes, v.shape[:4], out_sharding=PartitionSpec(*spec))

    def all_positions(self, name: str, x: Array) -> Array:
        with jax.named_scope(name):
            gathered = all_positions(self.layout, name, "BTs")
            return checkpoint_name(apply_reshard(gathered, x), MATMUL if gathered.forward else OPERATION)

    def for_heads(self, name: str, x: Array) -> Array:
        with jax.named_scope(name):
            return apply_reshard(shared_by_heads(self.layout, name, "BTs", "u"), x)

    def convolution(
        self,
        name: str,
        x: Array,
        taps: Array,
        bias: Array | None,
        at: AtLayer,
        *,
        memory: str,
        activated: bool = True,
    ) -> tuple[Array, AtLayer]:
        dims = tuple(range(2, x.ndim))
        with jax.named_scope(name):
            split = [partitions_of(x)[dim] for dim in dims]
            reduced = jax.typeof(taps).sharding.spec.reduced
            taps = reshard(taps.astype(x.dtype), PartitionSpec(*split, None, reduced=reduced))
            y, at = self._convolved(x, taps, at, memory)
        if bias is not None:
            y = self.bias(f"{name}_bias", y, bias)
        with jax.named_scope(name):
            return checkpoint_name(jax.nn.silu(y) if activated else y, OPERATION), at

    def _convolved(self, x: Array, taps: Array, at: AtLayer, memory: str) -> tuple[Array, AtLayer]:
        """The sums along positions of x by taps that are split as x; without a cache from position 0 on."""
        segments, pieces = self._segments(at.places), Pieces.of(self.layout, x)
        if pieces is not None:
            return convolved_pieces(x, taps, segments, pieces), at
        return convolved(x, taps, segments), at

    def recurrence(
        self,
        name: str,
        q: Array,
        k: Array,
        v: Array,
        decay: Array,
        beta: Array | None,
        at: AtLayer,
        log_rates: Array | None = None,
    ) -> tuple[Array, AtLayer]:
        with jax.named_scope(name):
            inputs, segments = self._inputs(q, k, v, decay, beta, log_rates), self._segments(at.places)
        inputs = self._with_own_rates(inputs)
        with jax.named_scope(name):
            pieces = Pieces.of(self.layout, v)
            if pieces is None:
                o = recurrence(inputs, segments)
            else:
                to_all = gathered_states(self.layout, name, letters_of_states(v))
                o = over_pieces(inputs, segments, pieces, to_all)
            return checkpoint_name(jnp.reshape(o, v.shape, out_sharding=spec_of(v)), KEPT), at

    def linear_unit(self, name: str, v: Array, decay: Array, at: AtLayer) -> tuple[Array, AtLayer]:
        split = spec_of(v)
        with jax.named_scope(name):
            positions = reshard(at.places.positions, PartitionSpec(*split.partitions[:2]))
            is_first = along(v, positions == 0, (0, 1))
            v = checkpoint_name(unit_inputs(v, decay, is_first), OPERATION)
            of_heads = PartitionSpec(*split.partitions[:3], None)
            ones = jnp.broadcast_to(jnp.ones((), v.dtype), (*v.shape[:3], 1), out_sharding=of_heads)
        y, at = self.recurrence(name, ones, ones, v[..., None], decay, None, at)
        return y[..., 0], at

    def _inputs(
        self, q: Array, k: Array, v: Array, decay: Array, beta: Array | None, log_rates: Array | None
    ) -> Inputs:
        """Inputs of arrays [B, T, ...]; values v[B, T, u] get a dimension p = 1, and rates are split as v."""
        if log_rates is None:
            return Inputs(q, k, v, decay, beta)
        heads = partitions_of(v)[2]
        reduced = jax.typeof(log_rates).sharding.spec.reduced
        log_rates = reshard(log_rates, PartitionSpec(heads, None, reduced=reduced))
        return Inputs(q, k, v[..., None], decay, beta, log_rates)

    def _with_own_rates(self, inputs: Inputs) -> Inputs:
        """The inputs with a copy of the rates for each device, if there are rates.

        Each device adds to the cotangent, which is then summed once, also if two scans read the rates.
        """
        if inputs.log_rates is None:
            return inputs
        over = [axis for entry in spec_of(inputs.v).partitions[:2] for axis in axes_of(entry)]
        with jax.named_scope("decay_log"):
            wide = inputs.log_rates.astype(jnp.float32)  # before, so that the sum is in float32 too
            return inputs._replace(log_rates=own_copies(wide, over))

    def _segments(self, places: Places) -> Array | None:
        """The segments of all positions of a device's sequences, also if it has only some of them."""
        if places.segments is None:
            return None
        spec = partition_spec(token_sharding(self.layout, "tokens").replace(axes={"T": ()}))
        return reshard(places.segments, spec)
