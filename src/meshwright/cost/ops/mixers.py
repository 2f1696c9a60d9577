"""Mixers with a state, recorded as nodes: recurrences and convolutions along positions.

The counterpart of `nn/mixers/`. In training and prefill a recurrence is computed by chunks of positions, with
the state between them; in a step of generation the state is read, changed and written once.
"""

from dataclasses import replace
from math import prod
from typing import Any

from meshwright.cost.graph import Node, Transfer, Value, Work
from meshwright.cost.ops.products import ProductOps
from meshwright.layout.moves.attention import all_positions, shared_by_heads
from meshwright.models.config import LayerKind
from meshwright.models.count import state_arrays
from meshwright.models.mixers.mixer import CHUNK, WIDE_FUNCTIONS
from meshwright.models.transformer import Places
from meshwright.notation.array import ShardedArray
from meshwright.notation.operation import placed
from meshwright.units import whole


class MixerOps(ProductOps):
    """The operations of `models/mixers/`."""

    def apply(self, name: str, function: str, spec: str, *operands: Value, **constants: Any) -> Value:
        """An elementwise function; sums over a split group of values are reduced."""
        given, _, letters = spec.partition("->")
        x = operands[0]
        dtype = "f32" if function in WIDE_FUNCTIONS else self.layout.precision.compute_dtype
        array = self.layout.activation(name, letters)
        read = []
        for operand, letters_of in zip(operands, given.split(","), strict=True):
            if letters_of.startswith("BT"):
                read.append(operand)
            else:
                operation = placed((array, operand.array), array, wanted=True)
                self.sum_gradient(name, operand, operation.reshards[1].yielded)
        sums = ()
        if normed := constants.get("normed"):
            dims = tuple(letter for letter in letters if letter not in normed)
            over = tuple(axis for letter in normed for axis in array.axes_of(letter))
            squares = ShardedArray(name, dims, tuple(array.axes_of(letter) for letter in dims), over)
            finished = placed((squares,), squares.replace(unreduced=()), wanted=True).reshards[0]
            sums = self.transfers("norm statistics", finished.forward, name, "f32", critical=True)
        out = self.value(array, dtype)
        return self.elementwise(
            name, tuple(read), out, tuple(read) or (x,), forward_transfers=sums, backward_transfers=sums
        )

    def all_positions(self, name: str, x: Value) -> Value:
        whole = all_positions(self.layout, name, "".join(x.array.dims))
        return self.reshard(name, "move", x, whole, x.dtype, critical=True)

    def for_heads(self, name: str, x: Value) -> Value:
        """The cotangents of all heads are added."""
        shared = shared_by_heads(self.layout, name, "".join(x.array.dims), "u")
        return self.reshard(name, "move", x, shared, x.dtype, critical=True)

    def convolution(
        self,
        name: str,
        x: Value,
        taps: Value,
        bias: Value | None,
        places: Places,
        cache: object,
        kind: LayerKind,
        *,
        memory: str,
        activated: bool = True,
    ) -> tuple[Value, object]:
        """Each channel's sum of its last inputs, weighed by taps; generation reads the inputs before."""
        for stored in (taps, *([bias] if bias else [])):
            operation = placed((x.array, stored.array), x.array, wanted=True)
            self.sum_gradient(stored.name, stored, operation.reshards[1].yielded)
        return self.elementwise(name, (x,), self.value(x.array, x.dtype), (x,)), cache

    def recurrence(
        self,
        name: str,
        q: Value,
        k: Value,
        v: Value,
        decay: Value,
        beta: Value | None,
        places: Places,
        cache: object,
        kind: LayerKind,
    ) -> tuple[Value, object]:
        """The work of `chunk_flops` or `step_flops`; a state in float32 passes between chunks through memory.

        The backward pass computes the states and parts of each chunk again (`backward_flops`).
        """
        mixer, d_model = self.config.state_mixer, self.config.d_model
        assert mixer is not None, "a recurrence is of a mixer with a state"
        out = self.value(v.array, v.dtype)
        inputs = (q, k, v, decay, *([beta] if beta else []))
        heads = prod(mixer.sizes(d_model).get(letter, 1) for letter in "gu")
        # Tokens times the share of the heads that one device has.
        tokens = self.elements(v.array) / self.sizes["p"] / heads
        moved = sum(value.bytes_per_device for value in (*inputs, out))
        shape = self.sizes["T"], float(self.sizes["s"]), float(CHUNK)
        if self.sizes["T"] == 1:
            state = self.states(1)["state"].bytes_per_device
            work = Work(mixer.step_flops(d_model) * tokens, moved + 2 * state, shape=shape)
            return self.add(Node(name, "attention", inputs, (out,), inputs, (work,))), cache
        of_state = tokens * heads * self.sizes["s"] * self.sizes["p"] / CHUNK * 4
        states = Value(v.array.replace(name="chunk_states"), "f32", whole(of_state))
        flops = mixer.chunk_flops(d_model) * tokens
        forward = Work(flops, moved + 2 * of_state, shape=shape)
        backward = Work(mixer.backward_flops(d_model) * tokens, 2 * moved + 4 * of_state, shape=shape)
        handed_on = self._handed_on(name, v, with_keys=beta is not None)
        node = Node(name, "attention", inputs, (out, states), (*inputs, states), (forward,), (backward,))
        return self.add(replace(node, forward_transfers=handed_on, backward_transfers=handed_on)), cache

    def _handed_on(self, name: str, v: Value, *, with_keys: bool) -> tuple[Transfer, ...]:
        """States gathered over the axes that split positions, so that each device begins with the last one.

        The delta rule changes a state by a product with an array [s, s], which is gathered too.
        """
        if not (over := v.array.axes_of("T")):
            return ()
        heads = self.elements(v.array) / self.sizes["p"] / self.sizes["T"] * self.mesh.size(over)
        keys = self.sizes["s"] if with_keys else 0
        each = whole(heads * self.sizes["s"] * (self.sizes["p"] + keys) * 4 * self.mesh.size(over))
        return (Transfer("activations", "all_gather", over, name, each, "f32", critical=True),)

    def states(self, num_layers: int) -> dict[str, Value]:
        """The arrays that `num_layers` layers keep of the sequences."""
        sizes = self.sizes
        self.sizes = sizes | {"L": num_layers}
        dtype = self.layout.precision.compute_dtype
        arrays = {
            name: self.value(self.layout.activation(name, "L" + letters), kept)
            for name, (letters, kept) in state_arrays(self.config, dtype).items()
        }
        self.sizes = sizes
        return arrays
