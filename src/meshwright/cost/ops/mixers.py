"""Mixers with a state, recorded as nodes: recurrences and convolutions along positions.

The counterpart of `nn/mixers/`. In training and prefill a recurrence is computed by chunks of positions, with
the state between them; in a step of generation the state is read, changed and written once.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

from meshwright.cost.arrays import ceiling, larger, smaller
from meshwright.cost.graph import Node, Transfer, Value, Work
from meshwright.cost.ops.products import ProductOps
from meshwright.dtypes import dtype_bytes
from meshwright.layout.moves.attention import attention_layout, shared_by_heads, token_sharding
from meshwright.layout.moves.states import all_positions, gathered_states
from meshwright.models.at_layer import AtLayer
from meshwright.models.count import state_arrays, state_variants
from meshwright.models.layer_kinds import LayerKind
from meshwright.models.mixers.mixer import CHUNK, HEADS, WIDE_FUNCTIONS, AddedFlops, LoopPass, StateMixer
from meshwright.models.parameters import dimensions
from meshwright.notation.array import ShardedArray
from meshwright.notation.operation import placed_operation
from meshwright.units import whole

# Arrays of the size of all states of a chunk, in the backward pass, if the states of all positions are
# computed: Falcon Mamba compiled for 8 H100s has 14 of an eighth of that size.
_STATE_ARRAYS = 2


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
                operation = placed_operation((array, operand.array), array, wanted=True)
                self.sum_gradient(name, operand, operation.reshards[1].yielded)
        sums = ()
        if normed := constants.get("normed"):
            dims = tuple(letter for letter in letters if letter not in normed)
            over = tuple(axis for letter in normed for axis in array.axes_of(letter))
            squares = ShardedArray(name, dims, tuple(array.axes_of(letter) for letter in dims), over)
            finished = placed_operation((squares,), squares.replace(unreduced=()), wanted=True).reshards[0]
            sums = self.transfers("norm statistics", finished.forward, name, "f32", critical=True)
        out = self.value(array, dtype)
        return self.elementwise(
            name, tuple(read), out, tuple(read) or (x,), forward_transfers=sums, backward_transfers=sums
        )

    def slopes(self, name: str, v: Value, kind: LayerKind) -> Value:
        return self.elementwise(name, (), self.value(self.layout.activation(name, "BTgu"), "f32"), ())

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
        at: AtLayer,
        *,
        memory: str,
        activated: bool = True,
    ) -> tuple[Value, AtLayer]:
        """Each channel's sum of its last inputs, weighed by taps; generation reads the inputs before."""
        for stored in (taps, *([bias] if bias else [])):
            operation = placed_operation((x.array, stored.array), x.array, wanted=True)
            self.sum_gradient(stored.name, stored, operation.reshards[1].yielded)
        read = (x, *self._halos(name, x, taps))
        out = self.value(x.array, x.dtype)
        last = self._last_inputs(name, x, taps) if self.layout.phase == "prefill" else ()
        return self.elementwise(name, read, out, read, forward_transfers=last), at

    def recurrence(
        self,
        name: str,
        q: Value,
        k: Value,
        v: Value,
        decay: Value,
        beta: Value | None,
        at: AtLayer,
        log_rates: Value | None = None,
    ) -> tuple[Value, AtLayer]:
        """The work of `chunk_flops` or `step_flops`; a state in float32 passes between chunks through memory.

        The backward pass computes the states and parts of each chunk again (`backward_flops`).
        """
        if log_rates is not None:
            operation = placed_operation((v.array, log_rates.array), v.array, wanted=True)
            self.sum_gradient(log_rates.name, log_rates, operation.reshards[1].yielded)
        scanned = (k, v, decay, *([beta] if beta else []))
        # The columns of R are p. A has s of them with the delta rule, otherwise one, the decay of each row.
        columns = self.sizes["p"] + (1 if beta is None else self.sizes["s"])
        return self._scanned(name, (q, *scanned), scanned, v, columns), at

    def linear_unit(self, name: str, v: Value, decay: Value, at: AtLayer) -> tuple[Value, AtLayer]:
        scanned = v, decay
        return self._scanned(name, scanned, scanned, v, self.sizes["p"] + 1), at

    def _scanned(
        self, name: str, inputs: tuple[Value, ...], scanned: tuple[Value, ...], v: Value, columns: int
    ) -> Value:
        """The result, like v. scanned, columns: as in `_gathered_states`."""
        mixer, d_model = self._state_mixer(), self.config.d_model
        out = self.value(v.array, v.dtype)
        self.wide.add(name)
        heads, tokens, chunk = mixer.total_heads(d_model), self._tokens_of_heads(v), self._chunk(v)
        moved = sum(value.bytes_per_device for value in (*inputs, out))
        shape = self.sizes["T"], float(self.sizes["s"]), chunk
        if self.sizes["T"] == 1 or self.layout.phase == "generate":
            # Read once; written after each token, since drafts may be wrong.
            state = self.states(1)["state"].bytes_per_device
            of_states = state * (1 + self.sizes["T"])
            work = Work(mixer.step_flops(d_model) * tokens, moved + of_states, shape=shape)
            # A layer's new states are an array before they are written to the cache's.
            made = whole(state * self.sizes["T"])
            return self.add(Node(name, "attention", inputs, (out,), inputs, (work,), scratch=made))
        of_state = tokens * heads * self.sizes["s"] * self.sizes["p"] / chunk * 4
        states = Value(v.array.replace(name="chunk_states"), "f32", whole(of_state))
        solved, shared = self._solve_flops(self.sizes["p"], chunk), mixer.shared_flops(d_model, chunk)
        over_heads = [axis for dim in v.array.dims if dim in HEADS for axis in v.array.axes_of(dim)]
        repeated = tokens * (self.mesh.size(tuple(over_heads)) - 1)
        flops = (mixer.chunk_flops(d_model, chunk) + solved.forward) * tokens + shared.forward * repeated
        of_backward = (mixer.backward_flops(d_model, chunk) + solved.backward) * tokens
        # With XLA's loops `chunk_bytes` has the states within a chunk, so only those at its end are added.
        every = chunk if self.lowering.loops_over_chunks else smaller(mixer.written_every, chunk)
        written = of_state * chunk / every
        forward = Work(flops, moved + 2 * written, shape=shape)
        backward = Work(of_backward + shared.backward * repeated, 2 * moved + 4 * written, shape=shape)
        forward, backward = self._in_loops(v.array, tokens, chunk, forward, backward)
        if over := v.array.axes_of("T"):
            inputs += (self._gathered_states(name, scanned, v, columns),)
            sequences = tokens / self.sizes["T"] * self.mesh.size(over)
            num_pieces = self.mesh.size(over) * self._pieces_of_device(v.array)
            added = mixer.piece_flops(d_model, chunk).added * sequences * num_pieces
            forward = replace(forward, flops=forward.flops + added)
            backward = replace(backward, flops=backward.flops + 3 * added)
        node = Node(name, "attention", inputs, (out, states), (*inputs, states), (forward,), (backward,))
        return self.add(replace(node, scratch=self._scratch(v.array, (*scanned, out), of_state, chunk)))

    def _in_loops(
        self, array: ShardedArray, tokens: Any, chunk: Any, forward: Work, backward: Work
    ) -> tuple[Work, Work]:
        """The work of both passes, with the kernels of XLA's loops over chunks and the bytes between them."""
        if not self.lowering.loops_over_chunks:
            return forward, backward
        mixer, chunks = self._state_mixer(), self._num_chunks(array, chunk)
        num_bytes = mixer.chunk_bytes(self.config.d_model, chunk) * tokens

        def looped(work: Work, of_chunk: LoopPass) -> Work:
            moved = work.hbm_bytes + of_chunk.passes * num_bytes
            return replace(work, kernels=chunks * of_chunk.kernels, hbm_bytes=moved)

        loops = mixer.loops()
        return looped(forward, loops.forward), looped(backward, loops.backward)

    def _num_chunks(self, array: ShardedArray, chunk: Any) -> Any:
        """Turns of the loop over chunks: a turn has one chunk of every sequence. Pieces have own loops."""
        over = array.axes_of("T")
        pieces = self.mesh.size(over) * self._pieces_of_device(array) if over else 1
        return ceiling(self.sizes["T"] / pieces / chunk)

    def _scratch(self, array: ShardedArray, copied: tuple[Value, ...], of_state: Any, chunk: Any) -> Any:
        """Bytes of arrays of a recurrence's backward pass: copies in the order of chunks, and states.

        A scan over chunks reads arrays with the chunks first. If a device has several sequences, inputs and
        the result's cotangent are copied into that order. If products sum over positions, XLA for TPUs stores
        positions last, in tiles that are wider than a chunk. Otherwise the states of all positions of a chunk
        are kept. copied: inputs and result. of_state: bytes of the states between chunks.
        """
        has_several = self._local(array, "B") > 1
        scans = self._state_mixer().written_every == 1
        tiles = 1.0 if scans else larger(1.0, self.lowering.lanes / chunk)
        copies = sum(value.bytes_per_device for value in copied) * has_several * tiles
        pieces = self.mesh.size(array.axes_of("T"))
        of_chunk = of_state * chunk * chunk / (self.sizes["T"] / pieces)
        is_trained = self.layout.phase == "train"
        num_arrays = _STATE_ARRAYS if is_trained else _STATE_ARRAYS / 2  # inference has no cotangents
        return whole(copies + scans * num_arrays * of_chunk)

    def _solve_flops(self, columns: int, chunk: Any) -> AddedFlops:
        """`StateMixer.solve_flops` on platforms that solve by products."""
        mixer = self._state_mixer()
        return mixer.solve_flops(columns, chunk) if self.lowering.solves_by_products else AddedFlops(0.0, 0.0)

    def _gathered_states(self, name: str, scanned: tuple[Value, ...], v: Value, columns: int) -> Value:
        """The states and decays of all pieces of a sequence whose positions are split, on each device.

        scanned: k, v, decay, and beta of the delta rule. columns: of the array [s, columns] of each head that
        a piece adds.
        """
        mixer, tokens, sizes = self._state_mixer(), self._tokens_of_heads(v), self.sizes
        chunk = self._chunk(v)
        flops = mixer.piece_flops(self.config.d_model, chunk)
        read = sum(value.bytes_per_device for value in scanned)
        num_heads = mixer.total_heads(self.config.d_model)
        chunk_states = 4 * tokens * num_heads * sizes["s"] * columns / chunk
        shape = sizes["T"], float(sizes["s"]), chunk
        solved = self._solve_flops(columns, chunk)
        of_forward, of_backward = ((a + b) * tokens for a, b in zip(flops[:2], solved, strict=True))
        forward = Work(of_forward, read + 2 * chunk_states, shape=shape)
        backward = Work(of_backward, 2 * read + 4 * chunk_states, shape=shape)
        forward, backward = self._in_loops(v.array, tokens, chunk, forward, backward)
        heads = (dim for dim in v.array.dims if dim in HEADS)
        gather = gathered_states(self.layout, name, "".join(("B", "T", *heads, "s", "p")))
        num_pieces = self._pieces_of_device(v.array) * self.mesh.size(v.array.axes_of("T"))
        self.sizes = sizes | {"T": num_pieces, "p": columns}
        summary = self.value(gather.given, "f32")
        self.add(Node(name, "attention", scanned, (summary,), scanned, (forward,), (backward,)))
        gathered = self.reshard(name, "move", summary, gather, "f32", critical=True)
        self.sizes = sizes
        return gathered

    def _halos(self, name: str, x: Value, taps: Value) -> tuple[Value, ...]:
        """The inputs before each piece of positions on a device, from its neighbours; none if T is whole."""
        over, size = x.array.axes_of("T"), self.mesh.size(x.array.axes_of("T"))
        if not over or self.sizes["T"] == 1:
            return ()
        width, count = self.sizes[taps.array.dims[-1]] - 1, self._pieces_of_device(x.array)
        block = self.elements(x.array) / self.sizes["T"] * size * width * dtype_bytes(x.dtype)
        sent = Transfer("activations", "permute", over, name, whole(block * size), x.dtype, critical=True)
        before = Value(x.array, x.dtype, whole(count * block))
        moved = (sent,) * count
        node = Node(name, "move", (x,), (before,), forward_transfers=moved, backward_transfers=moved)
        return (self.add(node),)

    def _last_inputs(self, name: str, x: Value, taps: Value) -> tuple[Transfer, ...]:
        """The all-reduce that sends the last inputs of prompts to all devices; none if T is whole."""
        over = x.array.axes_of("T")
        if not over:
            return ()
        count = self.sizes[taps.array.dims[-1]] - 1
        of_token = self.elements(x.array) / self.sizes["T"] * self.mesh.size(over) * dtype_bytes(x.dtype)
        sent = whole(count * of_token)
        return (Transfer("activations", "all_reduce", over, name, sent, x.dtype, critical=False),)

    def _chunk(self, v: Value) -> Any:
        """Positions of a chunk: CHUNK, or all of a shorter sequence or of a device's shorter piece."""
        over = v.array.axes_of("T")
        pieces = self.mesh.size(over) * self._pieces_of_device(v.array) if over else 1
        return smaller(float(CHUNK), self.sizes["T"] / pieces)

    def _pieces_of_device(self, array: ShardedArray) -> int:
        """The pieces of each sequence on a device, if positions are split as `array`: two if they divide."""
        over, size = array.axes_of("T"), self.mesh.size(array.axes_of("T"))
        if token_sharding(attention_layout(self.layout), "tokens").axes_of("T") != over:
            return 1  # heads are exchanged for positions in attention
        return 1 if isinstance(size, int) and self.sizes["T"] % (2 * size) else 2

    def _state_mixer(self) -> StateMixer:
        mixer = self.config.state_mixer
        assert mixer is not None, "a recurrence is of a mixer with a state"
        return mixer

    def all_states(self) -> list[Value]:
        """The arrays of all layers with states."""
        counts = Counter(state_variants(self.config))
        return [one for variant, count in counts.items() for one in self.states(count, variant).values()]

    def _tokens_of_heads(self, v: Value) -> Any:
        """Tokens times the share of the heads that one device has."""
        return self.elements(v.array) / self.sizes["p"] / self._state_mixer().total_heads(self.config.d_model)

    def states(self, num_layers: int, variant: int = 0) -> dict[str, Value]:
        """The arrays that `num_layers` layers of a variant keep of the sequences."""
        sizes, config = self.sizes, self.config.at(variant)
        of_layers = dimensions(config) if variant else {}
        self.sizes = {**sizes, **of_layers, "L": num_layers}
        dtype = self.layout.precision.compute_dtype
        arrays = {
            name: self.value(self.layout.activation(name, "L" + letters), kept)
            for name, (letters, kept) in state_arrays(config, dtype).items()
        }
        self.sizes = sizes
        return arrays
