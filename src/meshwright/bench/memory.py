"""Memory-bound operations of a Transformer: bytes a second by the passes that cost/ops.py counts.

XLA on CPU does not stream all of them at the speed of memory: reductions and exponentials keep the
core busy. What a plan needs is how long they take for the bytes it counts, so that is measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.bench.devices import Operand, program
from meshwright.bench.matmul import harmonic_mean
from meshwright.bench.timing import Progress, Timing, report, time_interleaved
from meshwright.units import dtype_bytes

ROUNDS = 5


@dataclass(frozen=True)
class Operation:
    """An elementwise operation. passes: how often cost/ops.py counts the array as read or written."""

    name: str
    local: Callable[..., object]
    num_operands: int
    passes: int


@dataclass(frozen=True)
class Measured:
    """The time of one operation on arrays of `shape`."""

    operation: Operation
    shape: tuple[int, ...]
    dtype: str
    timing: Timing

    @property
    def bytes_per_second(self) -> float:
        num_bytes = self.operation.passes * prod(self.shape) * dtype_bytes(self.dtype)
        return num_bytes / self.timing.seconds


def measure(
    num_devices: int, progress: Progress, shapes: Sequence[tuple[int, ...]] | None = None
) -> list[Measured]:
    """Every operation in float32, each on all `shapes` (by default those that suit it)."""
    points = [(op, shape) for op, own in OPERATIONS for shape in shapes or own]
    report(progress, f"compiling {len(points)} elementwise programs")
    programs = [program(op.local, [Operand(s, "f32")] * op.num_operands, num_devices, 1) for op, s in points]
    report(progress, "timing elementwise programs")
    timings = time_interleaved(programs, ROUNDS)
    return [Measured(op, s, "f32", timing) for (op, s), timing in zip(points, timings, strict=True)]


def bytes_per_second(measured: Sequence[Measured]) -> float:
    """Bytes a second of one device: as many bytes of each operation, over the seconds they take."""
    return harmonic_mean([one.bytes_per_second for one in measured])


def _multiply_add(x: Array, y: Array) -> Array:
    return 1.5 * x + y


def _swiglu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def _swiglu_gradient(gate: Array, up: Array, cotangent: Array) -> tuple[Array, ...]:
    return jax.vjp(_swiglu, gate, up)[1](cotangent)


def _norm(x: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def _norm_gradient(x: Array, cotangent: Array) -> tuple[Array, ...]:
    return jax.vjp(_norm, x)[1](cotangent)


def _softmax(scores: Array) -> Array:
    """Causal attention weights of scores[heads * T, S]; row t of each T sees keys up to t."""
    query = lax.broadcasted_iota(jnp.int32, scores.shape, 0) % scores.shape[1]
    key = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jax.nn.softmax(jnp.where(key <= query, scores, -jnp.inf), axis=-1)


def _softmax_gradient(scores: Array, cotangent: Array) -> tuple[Array, ...]:
    return jax.vjp(_softmax, scores)[1](cotangent)


_ROWS = 1024

# The arrays of a small model: tokens by D, F or V, and 32 heads of 256 x 256 scores.
OPERATIONS = (
    (Operation("multiply-add", _multiply_add, 2, 3), ((_ROWS, 256), (_ROWS, 4096))),
    (Operation("swiglu", _swiglu, 2, 3), ((_ROWS, 768),)),
    (Operation("swiglu gradient", _swiglu_gradient, 3, 4), ((_ROWS, 768),)),
    (Operation("norm", _norm, 1, 2), ((_ROWS, 256),)),
    (Operation("norm gradient", _norm_gradient, 2, 3), ((_ROWS, 256),)),
    (Operation("softmax", _softmax, 1, 5), ((8 * _ROWS, 256),)),
    (Operation("softmax gradient", _softmax_gradient, 2, 11), ((8 * _ROWS, 256),)),
)
