"""The number types and the optimizer of a step."""

from dataclasses import dataclass

from meshwright.dtypes import number_type, types_for
from meshwright.errors import LayoutError
from meshwright.optimizers import OPTIMIZERS

# The numbers of a narrow operand that share a scale (nn/products/narrow.py).
MATMUL_SCALES = ("rows", "tiles")


@dataclass(frozen=True)
class Precision:
    """Number types of stored and computed arrays.

    weights_dtype: stored weights; narrower than bf16 only in inference. kv_dtype: the cache of keys and
    values in inference (None: compute_dtype). compute_dtype: activations and gathers. matmul_dtype: the
    operands of matmuls (None: compute_dtype). matmul_scales: the numbers of narrow
    operands that share a scale in training, "rows" (None) or "tiles" of 128. saved_dtype: the inputs of
    products and gates, as kept for the backward pass (None: as computed). gradients_dtype: gradients, as
    summed over devices (None: compute_dtype) and over microbatches (None: weights_dtype). optimizer: a name
    in OPTIMIZERS. optimizer_dtype: its state, such as Adam's two moments. master_weights: whether the
    optimizer keeps a float32 copy of the weights.
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
        fits = types_for("weights", "train")
        if self.weights_dtype not in fits:
            raise LayoutError(
                f"layout: weights_dtype = {self.weights_dtype!r}; fits: {', '.join(fits)} in training"
            )


_MAY_BE_NONE = ("matmul_dtype", "matmul_scales", "gradients_dtype", "kv_dtype", "saved_dtype")
FITS = {
    "weights_dtype": types_for("weights"),
    "kv_dtype": types_for("cache"),
    "compute_dtype": types_for("activations"),
    "matmul_dtype": types_for("operands"),
    "saved_dtype": types_for("saved activations"),
    "gradients_dtype": types_for("gradients"),
    "optimizer_dtype": types_for("optimizer state"),
    "optimizer": tuple(OPTIMIZERS),
    "matmul_scales": MATMUL_SCALES,
}


def matmul_dtype_of(weights_dtype: str, kind: str) -> str | None:
    """The type of operands in which chips of a kind serve weights of a type; None for compute_dtype."""
    return weights_dtype if kind in number_type(weights_dtype).operands_on else None
