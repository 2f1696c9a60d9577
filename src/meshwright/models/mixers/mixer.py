"""The record of a mixer that keeps a state for each sequence, in place of keys and values.

A mixer is one file of this folder: a table of ModelConfig with its sizes, weights, state and forward pass.
`nn/mixers/` computes the operations that `mix` calls.

Letters: g groups of heads (key heads), u heads of a group, s elements of a key (the state's size), p elements
of a value, o channels of a gate, c taps of a convolution along positions and t the inputs that it
remembers (c - 1), r rank of decays and gates, i channels of a short convolution. Heads are split as query
heads N are: by g, or by u if there is one group; then arrays have no g. Channels i are split as F
is. The latent m that experts read in place of a token (models/config.py, MoE) is split as D is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple, Protocol

from meshwright.models.at_layer import AtLayer, CommonOps, Kind, V
from meshwright.models.param import Param

HEADS = "gu"  # letters of heads; arrays of mixers with one group have no g
# The letters that take the place of a letter of the rules in arrays of mixers, the first that an array has.
LIKE_LETTERS: Mapping[str, str] = {"N": HEADS, "F": "i", "D": "m"}
# Functions of `apply` whose results stay in float32, since they are exponents or small shares.
WIDE_FUNCTIONS = ("decay", "decayed_step", "sigmoid", "slow_decay", "step")
# Positions that the chunked form computes at once.
CHUNK = 64


class State(NamedTuple):
    """An array that a layer keeps of each sequence: its letters, and its type (None: of activations)."""

    letters: str
    dtype: str | None = None


class PieceFlops(NamedTuple):
    """FLOPs of the summary of a piece of positions, and of its use.

    forward, backward: of the scan of a piece, per token. added: to add a piece to the states of all heads.
    """

    forward: float
    backward: float
    added: float


class ChunkProduct(NamedTuple):
    """A float32 product of a chunk: [rows, contracted] by [contracted, columns] in each of `heads`."""

    heads: int
    rows: float
    contracted: float
    columns: float

    @property
    def flops(self) -> float:
        return 2 * self.heads * self.rows * self.contracted * self.columns

    @property
    def num_bytes(self) -> float:
        """Bytes of its operands and its result."""
        rows, contracted, columns = self[1:]
        return 4 * self.heads * (rows * contracted + contracted * columns + rows * columns)


class LoopPass(NamedTuple):
    """A turn of XLA's loop over chunks, in the forward or the backward pass.

    kernels: run one after another. passes: the bytes that move through memory between them, over
    `StateMixer.chunk_bytes`.
    """

    kernels: int
    passes: float


class Loops(NamedTuple):
    """XLA's loops over chunks, counted in training steps compiled for H100s (jax 0.10.2).

    The backward pass has two loops: one computes the states again, the other the cotangents.
    """

    forward: LoopPass
    backward: LoopPass


class StateOps(CommonOps[V], Protocol[V]):
    """The operations of mixers with a state.

    apply: an elementwise function (`nn/mixers/elementwise.py`) of activations and small weights; the spec
      has the letters of each operand and of the result, as in "BTgup,gu->BTgup". normed: the letters over
      which the function norms.
    all_positions: x[B, T, s], which all heads share, with all positions. for_heads: the same, so that every
      device of the heads adds to its cotangent.
    convolution: causal along positions, channel by channel, with silu if `activated`; `memory` names the
      state's array of inputs.
    slopes: log-decays [B, T, g, u] of values v[B, T, g, u, p], fixed by the head and the layer.
    recurrence: o[B, T, g, u, p] of queries and keys [B, T, g, s], values and log-decays [B, T, g, u]. Per
      head and position, S = exp(decay) S + k v^T and o = q S. With beta [B, T, g, u] the delta rule:
      S = exp(decay) S + k (beta (v - k exp(decay) S))^T. A decay with s more is per element of the key.
      With log_rates[u, s] and values [B, T, u], the log-decay is -exp(log_rates) times `decay`.
    linear_unit: h[B, T, g, u] of inputs v and log-decays of the same shape: h = a h + sqrt(1 - a^2) v with
      a = exp(decay), and v at the first position of a document.
    """

    def apply(
        self, name: str, function: str, spec: str, *operands: V, normed: str = "", **constants: object
    ) -> V: ...
    def all_positions(self, name: str, x: V) -> V: ...
    def for_heads(self, name: str, x: V) -> V: ...
    def slopes(self, name: str, v: V, kind: Kind) -> V: ...
    def convolution(
        self, name: str, x: V, taps: V, bias: V | None, at: AtLayer, *, memory: str, activated: bool = True
    ) -> tuple[V, AtLayer]: ...
    def recurrence(
        self, name: str, q: V, k: V, v: V, decay: V, beta: V | None, at: AtLayer, log_rates: V | None = None
    ) -> tuple[V, AtLayer]: ...
    def linear_unit(self, name: str, v: V, decay: V, at: AtLayer) -> tuple[V, AtLayer]: ...


class AddedFlops(NamedTuple):
    """FLOPs of a token in the forward and the backward pass."""

    forward: float
    backward: float


@dataclass(frozen=True)
class StateMixer:
    """A table of ModelConfig that describes a mixer with a state.

    title: for people. runs: whether `nn/mixers` computes it; otherwise it is only planned. written_every:
    positions between states that a pass writes to memory.
    """

    title: ClassVar[str]
    runs: ClassVar[bool] = False
    written_every: ClassVar[int] = CHUNK

    def sizes(self, d_model: int) -> dict[str, int]:
        """The size of each letter of its arrays."""
        raise NotImplementedError

    def total_heads(self, d_model: int) -> int:
        """Heads of all groups."""
        sizes = self.sizes(d_model)
        return prod(sizes.get(letter, 1) for letter in HEADS)

    def params(self) -> dict[str, Param]:
        """Its weights by name, without the norm before it."""
        raise NotImplementedError

    def states(self) -> dict[str, State]:
        """The arrays that it keeps of each sequence, of any length."""
        raise NotImplementedError

    def slope(self, number: int, num_layers: int) -> float:
        """The factor of the decays of layer `number`, if they are fixed and differ from layer to layer."""
        return 1.0

    def chunk_products(self, d_model: int, chunk: float = CHUNK) -> tuple[ChunkProduct, ...]:
        """The products of a chunk's forward pass, without weights and convolutions."""
        return ()

    def chunk_flops(self, d_model: int, chunk: float = CHUNK) -> float:
        """FLOPs of a token in the chunked form (training, prefill), without weights and convolutions."""
        return sum(product.flops for product in self.chunk_products(d_model, chunk)) / chunk

    def chunk_bytes(self, d_model: int, chunk: float = CHUNK) -> float:
        """Bytes per token that the products of a chunk read and write, if each is a separate kernel."""
        return sum(product.num_bytes for product in self.chunk_products(d_model, chunk)) / chunk

    def loops(self) -> Loops:
        """Kernels and memory traffic of XLA's loops over chunks."""
        raise NotImplementedError

    def backward_flops(self, d_model: int, chunk: float = CHUNK) -> float:
        """FLOPs of a token's backward pass: each chunk again, and two products for each of its own."""
        return 3 * self.chunk_flops(d_model, chunk)

    def piece_flops(self, d_model: int, chunk: float = CHUNK) -> PieceFlops:
        """FLOPs to hand states on between pieces of positions on different devices (context parallelism).

        A scan of each piece sums its contribution to the state and its decay, 2 s (p + 1) for each head.
        Scans that write the state of every position have no products.
        """
        if self.written_every == 1:
            return PieceFlops(0.0, 0.0, 0.0)
        sizes = self.sizes(d_model)
        s, p = sizes["s"], sizes["p"]
        forward = 2 * self.total_heads(d_model) * s * (p + 1)
        return PieceFlops(forward, 3 * forward, 0.0)

    def shared_flops(self, d_model: int, chunk: float = CHUNK) -> AddedFlops:
        """The part of `chunk_flops` and `backward_flops` that devices which split the heads all repeat."""
        return AddedFlops(0.0, 0.0)

    def solve_flops(self, columns: int, chunk: float = CHUNK) -> AddedFlops:
        """Further FLOPs per token if triangular systems are solved by products (`Platform.solve_blocks`).

        columns: elements of a value, or columns of the array that a piece adds.
        """
        return AddedFlops(0.0, 0.0)

    def step_flops(self, d_model: int) -> float:
        """The same in the recurrent form (a step of generation)."""
        raise NotImplementedError

    def mix(
        self, ops: StateOps[V], w: Mapping[str, V], h: V, at: AtLayer, *, norm_eps: float
    ) -> tuple[V, AtLayer]:
        """y[B, T, D] of the normed h[B, T, D], and `at` with the new cache."""
        raise NotImplementedError


def biased(ops: StateOps[V], w: Mapping[str, V], name: str, y: V) -> V:
    """The product y with the weight `name`, plus its bias if it has one."""
    bias = f"{name}_bias"
    return ops.bias(bias, y, w[bias]) if bias in w else y


def with_biases(params: Mapping[str, Param], outer: Mapping[str, str]) -> dict[str, Param]:
    """Biases of the weights in `outer`, which has the letters of each."""
    return {f"{name}_bias": Param(letters, "zeros") for name, letters in outer.items() if name in params}
