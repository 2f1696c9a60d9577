"""The number types of a step, and the optimizer whose state some are of."""

from dataclasses import dataclass
from typing import Any

from meshwright.errors import LayoutError
from meshwright.optimizers import OPTIMIZERS
from meshwright.optimizers.optimizer import PACKED_DTYPES
from meshwright.units import dtype_bytes

DTYPES = ("f32", "bf16")
# Of weights that no gradient changes, and of caches.
STORED_DTYPES = (*DTYPES, "fp8", "int8", "int4")
# What a scale of a narrow operand is of (nn/products/narrow.py).
MATMUL_SCALES, SCALED_DTYPES = ("rows", "tiles"), ("fp8", "int8")
# The scope in which operands are brought to a type that holds theirs, of which there are no products.
EMULATED = "emulated"
# Numbers of a tile, along each of its dimensions.
TILE = 128
# Numbers of fp4 that share a scale, along what is summed over; of a weight along both dimensions.
FP4_BLOCK = 16
# Inputs of an output that share a scale, of weights in int4 (nn/products/quantised.py).
GROUP = 32
MATMUL_DTYPES = ("f32", "bf16", "f16", "fp8", "int8", "fp4")
OPTIMIZER_DTYPES = (*DTYPES, *PACKED_DTYPES)


@dataclass(frozen=True)
class Precision:
    """What arrays are stored and computed in.

    weights_dtype: stored weights; narrower than bf16 only where nothing is trained. kv_dtype: the cache of
    keys and values in inference (None: compute_dtype). compute_dtype: activations and gathers. matmul_dtype:
    the operands of matmuls alone (None: compute_dtype). matmul_scales: whether operands of fp8 or int8 have
    a scale for each of their "rows" (None) or of their "tiles" of 128 numbers, in training. saved_dtype: what
    products and gates alone read, as it is kept for the backward pass (None: as it is made). gradients_dtype:
    gradients, as they are summed over devices (None: compute_dtype) and over microbatches (None:
    weights_dtype). optimizer: of OPTIMIZERS; optimizer_dtype: of its state, such as Adam's two moments.
    master_weights: whether a float32 copy lies beside the weights.
    """

    weights_dtype: str = "bf16"
    compute_dtype: str = "bf16"
    matmul_dtype: str | None = None
    gradients_dtype: str | None = None
    optimizer_dtype: str = "f32"
    master_weights: bool = False
    kv_dtype: str | None = None
    saved_dtype: str | None = None
    optimizer: str = "adamw"
    matmul_scales: str | None = None

    def __post_init__(self) -> None:
        for name, fits in FITS.items():
            value = getattr(self, name)
            if value not in fits and not (value is None and name in _MAY_BE_NONE):
                raise LayoutError(f"layout: {name} = {value!r}; fits: {', '.join(fits)}")

    def check_trains(self) -> None:
        """Raises LayoutError for stored weights that no optimizer updates."""
        if self.weights_dtype not in DTYPES:
            raise LayoutError(
                f"layout: weights_dtype = {self.weights_dtype!r}; fits: {', '.join(DTYPES)} in training"
            )


_MAY_BE_NONE = ("matmul_dtype", "matmul_scales", "gradients_dtype", "kv_dtype", "saved_dtype")
FITS = {
    "weights_dtype": STORED_DTYPES,
    "kv_dtype": STORED_DTYPES,
    "compute_dtype": DTYPES,
    "matmul_dtype": MATMUL_DTYPES,
    "saved_dtype": ("fp8",),
    "gradients_dtype": DTYPES,
    "optimizer_dtype": OPTIMIZER_DTYPES,
    "optimizer": tuple(OPTIMIZERS),
    "matmul_scales": MATMUL_SCALES,
}


def saved_bytes_each(dtype: str, length: Any, scales: str | None) -> Any:
    """Bytes of a number that is kept in `dtype`, with its share of a float32 scale.

    length: of the rows that a device has of it. scales: of "rows" (None), or of "tiles" along them.

    >>> saved_bytes_each("fp8", 4096, None), saved_bytes_each("fp8", 4096, "tiles")
    (1.0009765625, 1.03125)
    """
    num_scales = -(-length // TILE) if scales == "tiles" else 1
    return dtype_bytes(dtype) + dtype_bytes("f32") * num_scales / length


def stored_bytes(dtype: str, inputs: Any) -> Any:
    """Bytes of a number of a stored weight, with its share of a float32 scale.

    inputs: over how many a product with the weight sums, which in int8 and fp8 share a scale.

    >>> stored_bytes("bf16", 4096), stored_bytes("int8", 4096), stored_bytes("int4", 4096)
    (2, 1.0009765625, 0.625)
    """
    if dtype in DTYPES:
        return dtype_bytes(dtype)
    return dtype_bytes(dtype) + dtype_bytes("f32") / (GROUP if dtype == "int4" else inputs)


def matmul_dtype_of(weights_dtype: str, kind: str) -> str | None:
    """The type of operands in which a chip of some kind serves such weights, None for that of the rest.

    XLA for CPU takes twenty times as long to widen int8 weights as to multiply them by int8 activations.
    """
    return "int8" if weights_dtype == "int8" and kind == "cpu" else None
