"""Matmuls of a Transformer's shapes, forward and both gradients, on all devices at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from meshwright.bench.all_devices import Operand, bench_of, local_hardware
from meshwright.bench.regression import rates
from meshwright.bench.timing import Listener, Prepared, Timing, run_prepared, tell
from meshwright.dtypes import COMPUTED
from meshwright.points import Points


@dataclass(frozen=True)
class MatmulShape:
    """x[rows, D] . w[D, F] on one device."""

    rows: int
    d_model: int
    d_ff: int

    @property
    def flops(self) -> int:
        """Forward, gradient of x and gradient of w: 3 . 2 rows D F."""
        return 6 * self.rows * self.d_model * self.d_ff


_PRODUCTS = 3
SHAPES = (
    MatmulShape(256, 256, 1024),
    MatmulShape(1024, 256, 768),
    MatmulShape(512, 512, 1536),
    MatmulShape(256, 1024, 1024),
)
# A layer's products of models of 1 to 70 billion parameters.
ACCELERATOR_SHAPES = (
    MatmulShape(2048, 2048, 2048),
    MatmulShape(4096, 4096, 4096),
    MatmulShape(8192, 4096, 14336),
)


@dataclass(frozen=True)
class MeasuredMatmul:
    """The time of one shape in one dtype."""

    shape: MatmulShape
    dtype: str
    timing: Timing

    @property
    def flops_per_second(self) -> float:
        return self.shape.flops / self.timing.seconds


def bench_matmul(spec: str, progress: Listener = None, shapes: Sequence[MatmulShape] = SHAPES) -> dict:
    """Matmul rates of one device of `spec`, all at work: `{"hardware", "results"}`.

    A result has dtype, rows, d_model, d_ff, flops (of the three products), seconds,
    flops_per_second, predicted_seconds (at the dtype's rate over all shapes), ratio and spread.
    """
    measured = run_prepared(prepare(local_hardware(spec).num_chips, progress, shapes))
    by_dtype = rates_by_dtype(measured)
    return {"hardware": spec, "results": [_result(one, by_dtype[one.dtype]) for one in measured]}


def prepare(num_devices: int, progress: Listener, shapes: Sequence[MatmulShape]) -> Prepared[MeasuredMatmul]:
    """Every shape in every dtype."""
    tell(progress, f"compiling matmuls on {num_devices} devices")
    points = [(shape, dtype) for dtype in COMPUTED for shape in shapes]
    bench = bench_of(num_devices)
    programs = [bench.program(_train_products, _operands(*point)) for point in points]
    return Prepared(
        programs,
        lambda timings: [
            MeasuredMatmul(*point, timing) for point, timing in zip(points, timings, strict=True)
        ],
    )


def _operands(shape: MatmulShape, dtype: str) -> list[Operand]:
    return [Operand((shape.rows, shape.d_model), dtype), Operand((shape.d_model, shape.d_ff), dtype)]


def _train_products(x: Array, w: Array) -> tuple[Array, Array]:
    """The gradients of x and of w for a cotangent equal to the product itself."""
    y = jnp.einsum("td,df->tf", x, w)
    return jnp.einsum("tf,df->td", y, w), jnp.einsum("td,tf->df", x, y)


def rates_by_dtype(measured: Sequence[MeasuredMatmul]) -> dict[str, float]:
    """FLOPs a second of a device by dtype: the harmonic mean over the shapes."""
    return {
        dtype: harmonic_mean([m.flops_per_second for m in measured if m.dtype == dtype]) for dtype in COMPUTED
    }


def matmul_rates(measured: Sequence[MeasuredMatmul]) -> dict[str, Points]:
    """FLOPs a second by the FLOPs of one product, for each dtype."""
    return {
        dtype: rates([m.shape.flops / _PRODUCTS for m in ours], [m.flops_per_second for m in ours])
        for dtype in COMPUTED
        if (ours := [m for m in measured if m.dtype == dtype])
    }


def harmonic_mean(rates: Sequence[float]) -> float:
    """The rate of equal amounts of work at each rate.

    >>> harmonic_mean([1.0, 3.0])
    1.5
    """
    return len(rates) / sum(1 / rate for rate in rates)


def _result(measured: MeasuredMatmul, rate: float) -> dict:
    shape, timing = measured.shape, measured.timing
    predicted = shape.flops / rate
    return {
        "dtype": measured.dtype,
        "rows": shape.rows,
        "d_model": shape.d_model,
        "d_ff": shape.d_ff,
        "flops": shape.flops,
        "seconds": timing.seconds,
        "flops_per_second": measured.flops_per_second,
        "predicted_seconds": predicted,
        "ratio": timing.seconds / predicted,
        "spread": timing.spread,
    }
