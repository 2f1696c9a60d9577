"""The number types and the optimizer of a step."""

from dataclasses import dataclass
from math import prod

from meshwright.dtypes import number_type, types_for
from meshwright.errors import LayoutError
from meshwright.models.config import ModelConfig
from meshwright.models.mixers import BLOCK_GATES
from meshwright.models.parameters import Param, dimensions, is_adapter, parameters
from meshwright.optimizers import OPTIMIZERS

# The numbers of a narrow operand that share a scale (nn/products/narrow.py).
MATMUL_SCALES = ("rows", "tiles")
# Names of weights that are stored wider than `weights_dtype`, if that is narrower than bf16.
_TABLES = ("embed", "unembed")
_WIDE_SHARE = 0.5  # with this share of wide layers or more, products price a matrix as wide in all layers
_NEVER_QUANTISED = ("router", "shared_router", "positions", *BLOCK_GATES)


@dataclass(frozen=True)
class Precision:
    """Number types of stored and computed arrays.

    weights_dtype: stored weights; narrower than bf16 only if they are not trained: in inference, and beside
    adapters. kv_dtype: the cache of keys and values in inference (None: compute_dtype). compute_dtype:
    activations and gathers. matmul_dtype: the operands of matmuls (None: compute_dtype). matmul_scales: the
    numbers of narrow operands that share a scale in training, "rows" (None) or "tiles" of 128. saved_dtype:
    the inputs of products and gates, as kept for the backward pass (None: as computed). gradients_dtype:
    gradients, as summed over devices (None: compute_dtype) and over microbatches (None: trained_dtype).
    optimizer: a name in OPTIMIZERS. optimizer_dtype: its state, such as Adam's two moments. master_weights:
    whether the optimizer keeps a float32 copy of the weights. experts_dtype: weights of experts in inference,
    if narrower than weights_dtype; chips that can multiply this type do. tables_dtype: the embedding and the
    output projection in inference, if wider than weights_dtype, as serving engines keep them.
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
    experts_dtype: str | None = None
    tables_dtype: str | None = None

    def __post_init__(self) -> None:
        for name, fits in FITS.items():
            value = getattr(self, name)
            if value not in fits and not (value is None and name in _MAY_BE_NONE):
                raise LayoutError(f"layout: {name} = {value!r}; fits: {', '.join(fits)}")

    @property
    def operand_dtype(self) -> str:
        """The type of matmul operands: `matmul_dtype`, by default `compute_dtype`."""
        return self.matmul_dtype or self.compute_dtype

    @property
    def cache_dtype(self) -> str:
        """The type of cached keys and values: `kv_dtype`, by default `compute_dtype`."""
        return self.kv_dtype or self.compute_dtype

    @property
    def trained_dtype(self) -> str:
        """The type of trained weights: `weights_dtype`, or `compute_dtype` next to quantised ones."""
        return self.weights_dtype if number_type(self.weights_dtype).scales is None else self.compute_dtype

    @property
    def accumulated_dtype(self) -> str:
        """The type of gradients as summed over microbatches and passed to the optimizer."""
        return self.gradients_dtype or self.trained_dtype

    def stored_dtype(self, path: str, param: Param) -> str:
        """The stored type of a weight: `weights_dtype`, if the weight is quantised.

        Embedding tables are int8 if weights are int4, and wide next to adapters; routers, norms, biases and
        block-diagonal gates are never quantised.
        """
        name = path.rpartition("/")[2]
        if self.experts_dtype and name.startswith("expert_") and param.init == "normal":
            return self.experts_dtype
        record = number_type(self.weights_dtype)
        if record.scales is None:
            return record.name
        if param.init != "normal" or name in _NEVER_QUANTISED or is_adapter(path):
            return self.compute_dtype
        if param.wide_in == record.name and param.wide_share >= _WIDE_SHARE:
            return self.compute_dtype
        if name in _TABLES and not param.trained:
            return self.tables_dtype or self.compute_dtype
        if name in _TABLES and (self.tables_dtype or record.tables):
            return self.tables_dtype or record.tables or record.name
        return record.name

    def weight_bytes(self, path: str, param: Param, inputs: float) -> float:
        """Mean bytes per element of a weight over its layers, including its share of a scale.

        inputs: the number of elements that a product sums over. Published files may keep a matrix wide in
        some of its layers only.
        """
        bytes_each = number_type(self.stored_dtype(path, param)).weight_bytes(inputs)
        if param.wide_in != self.weights_dtype or param.wide_share in (0, 1):
            return bytes_each
        dtypes = self.compute_dtype, self.weights_dtype
        wide, narrow = (number_type(name).weight_bytes(inputs) for name in dtypes)
        return param.wide_share * wide + (1 - param.wide_share) * narrow

    def check_trains(self, adapters: bool) -> None:
        """Raises LayoutError for stored weights that no optimizer updates.

        adapters: whether only adapters are trained, so that the other weights may be quantised (QLoRA,
        Dettmers et al. 2023).
        """
        fits = types_for("weights", "train")
        if self.weights_dtype not in fits and not (adapters and self.weights_dtype in types_for("weights")):
            raise LayoutError(
                f"layout: weights_dtype = {self.weights_dtype!r}; fits: {', '.join(fits)} in training, or "
                f"lora_rank=16 in the model, which trains adapters only{self._as_operands()}"
            )

    def _as_operands(self) -> str:
        """A hint to `matmul_dtype`, as the end of a sentence; empty if no matmul of training takes it."""
        if self.weights_dtype not in types_for("operands", "train"):
            return ""
        return f"; matmul_dtype = {self.weights_dtype} multiplies in it"


def stored_bytes(config: ModelConfig, precision: Precision) -> int:
    """The bytes of all weights of a model, with their scales, on one device."""
    total = 0.0
    for path, param in parameters(config).items():
        sizes = dimensions(config, path)
        inputs = prod(sizes[letter] for letter in param.fan_in if letter in param.letters)
        total += prod(param.shape(sizes)) * precision.weight_bytes(path, param, inputs)
    return round(total)


def published_precision(model: ModelConfig, *, by_engine: bool = False) -> dict[str, str]:
    """The fields of Precision with the number type of the model's published files.

    Empty without such a type, and if the server runs no weights in it. by_engine: the server is another
    engine, which runs every type that can be planned; otherwise `mw serve`.
    """
    if model.stored_dtype is None:
        return {}
    record = number_type(model.stored_dtype)
    if "weights" not in (record.uses if by_engine else record.served_as):
        return {}
    return {"experts_dtype" if record.of_experts else "weights_dtype": record.name}


_MAY_BE_NONE = (
    "experts_dtype",
    "tables_dtype",
    "matmul_dtype",
    "matmul_scales",
    "gradients_dtype",
    "kv_dtype",
    "saved_dtype",
)
FITS = {
    "weights_dtype": types_for("weights"),
    "experts_dtype": types_for("weights"),
    "tables_dtype": types_for("weights"),
    "kv_dtype": types_for("cache"),
    "compute_dtype": types_for("activations"),
    "matmul_dtype": types_for("operands"),
    "saved_dtype": types_for("saved activations"),
    "gradients_dtype": types_for("gradients"),
    "optimizer_dtype": types_for("optimizer state"),
    "optimizer": tuple(OPTIMIZERS),
    "matmul_scales": MATMUL_SCALES,
}
