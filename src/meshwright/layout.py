"""A Layout: which mesh axes split the named axes of weights and activations, and the schedule.

The planner emits it, the runner takes it, the audit checks it. It is a few degrees
(`data=2,fsdp=4,tensor=1`) and the rules that follow from them:

    weights      stored D_fsdp and N, K, F, V_tensor; a weight stays split over `tensor` while it
                 is used and is gathered over `fsdp` before
    activations  B_{data,fsdp}; T_context; N, K, F, V_tensor; with sequence parallelism T also takes
                 `tensor` where no other dimension does. Keys and values are gathered over `context`
    norms        whole on every device: they are too small to be worth a gather

A rule earlier in the list wins an axis, so h[B,T,F] has F_tensor and x[B,T,D] has T_tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

from meshwright.errors import LayoutError, nearest
from meshwright.models.config import ModelConfig
from meshwright.models.transformer import dimensions, parameters
from meshwright.notation.array import Axes, ShardedArray, dividing_degrees
from meshwright.notation.einsum import Contraction, Route, contraction, cotangent
from meshwright.notation.mesh import Mesh
from meshwright.notation.operation import placed

Rules = tuple[tuple[str, Axes], ...]

AXES = ("data", "fsdp", "context", "tensor")
REMATS = ("none", "matmuls", "full")
DTYPES = ("f32", "bf16")
# How a flag may be written; True and 1 are the same key.
_FLAGS: dict[object, bool] = {True: True, "true": True, "on": True, False: False, "false": False}


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh axes, and the schedule of a step.

    data: replicas of the weights. fsdp: shards of every weight, gathered before use (ZeRO-3).
    context: shards of each sequence. tensor: Megatron's tensor parallelism. sequence_parallel: split
    T of the residual stream over `tensor`. microbatches: gradient accumulation steps. remat: what the
    backward pass recomputes ("none", all but "matmuls", "full" block). weights_dtype: of the stored
    weights and gradients; compute_dtype: of matmuls and gathers. Adam's moments are f32.

    >>> layout = Layout(data=2, fsdp=2, tensor=2)
    >>> print(layout.weight("wq", "DNH"), layout.activation("x", "BTD"))
    wq[D_fsdp, N_tensor, H] x[B_{data,fsdp}, T, D]
    """

    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    microbatches: int = 1
    remat: str = "none"
    weights_dtype: str = "bf16"
    compute_dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in (*AXES, "microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(f"layout: {name} = {value!r}; it must be a positive integer")
        if self.remat not in REMATS:
            raise LayoutError(f"layout: remat = {self.remat!r}; {nearest(self.remat, list(REMATS))}")
        for name in ("weights_dtype", "compute_dtype"):
            if getattr(self, name) not in DTYPES:
                raise LayoutError(f"layout: {name} = {getattr(self, name)!r}; fits: {', '.join(DTYPES)}")

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh({axis: getattr(self, axis) for axis in AXES})

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the sequences of a batch."""
        return self._present("data", "fsdp")

    @cached_property
    def weight_axes(self) -> Axes:
        """The axes that split some weight: over them a norm of the gradients is summed."""
        return self._present("fsdp", "tensor")

    @property
    def num_batch_shards(self) -> int:
        return self.data * self.fsdp

    def _present(self, *axes: str) -> tuple[str, ...]:
        """Axes of size one split nothing and are left out of every array."""
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    @cached_property
    def _rules(self) -> "_Rules":
        present, tensor = self._present, self._present("tensor")
        positions = present("context") + (tensor if self.sequence_parallel else ())
        return _rules(self.batch_axes, present("fsdp"), tensor, positions)

    def weight(self, name: str, letters: str) -> ShardedArray:
        """The sharding in which a weight is stored, as are its gradient and moments."""
        matrix = len(letters.replace("L", "")) > 1
        return _split(name, letters, self._rules.stored if matrix else ())

    def activation(self, name: str, letters: str) -> ShardedArray:
        """The sharding of an activation (or a cache) with these letters."""
        return _split(name, letters, self._rules.activations)

    def tokens(self, name: str) -> ShardedArray:
        """The sharding of tokens, targets and positions: x[B, T]'s, but whole over `tensor`."""
        array = self.activation(name, "BT")
        return array.replace(axes={"T": self._present("context")})

    def keys(self, name: str) -> Route:
        """Keys (or values) from k[B, T_context, K, H], as projected, to T whole, as attention reads them.

        Every shard of the queries adds to their cotangents.
        """
        projected = self.activation(name, "BTKH")
        whole = projected.replace(axes={"T": ()})
        return Route(projected, whole, cotangent(whole).replace(unreduced=projected.axes_of("T")))

    def contraction(self, name: str, spec: str) -> Contraction:
        """The contraction of an activation with the weight `name`, as moves the fewest arrays.

        >>> print(*Layout(fsdp=4).contraction("wq", "BTD,DNH->BTNH").steps)
        AllGather_{fsdp} wq[D_fsdp, N, H] -> wq[D, N, H]
        """
        return _contraction(self._rules, name, spec)

    def check(
        self, config: ModelConfig, num_sequences: int | None = None, seq_len: int | None = None
    ) -> None:
        """Raises LayoutError where the model's dimensions, the batch or the sequence do not divide."""
        sizes = dimensions(config)
        for path, param in parameters(config).items():
            array = self.weight(path.rpartition("/")[2], param.letters)
            for dim, axes in zip(array.dims, array.axes, strict=True):
                if sizes[dim] % self.mesh.size(axes):
                    raise LayoutError(_does_not_divide(array, dim, axes, sizes[dim], self.mesh))
        splits = self.context * (self.tensor if self.sequence_parallel else 1)
        if seq_len is not None and seq_len % splits:
            raise LayoutError(
                f"{self.activation('x', 'BTD')}: {seq_len} positions (T) do not divide over {splits}; "
                f"fits: {-(-seq_len // splits) * splits} positions"
            )
        shards = self.num_batch_shards * self.microbatches
        if num_sequences is not None and num_sequences % shards:
            fit = max(1, round(num_sequences / shards)) * shards
            raise LayoutError(
                f"x[B_{{data,fsdp}}, T, D]: {num_sequences} sequences (B) do not divide over "
                f"data·fsdp·microbatches = {self.data}·{self.fsdp}·{self.microbatches} = {shards}; "
                f"fits: {fit} sequences"
            )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The layout written `data=2,fsdp=64,tensor=8,remat=full`.

        >>> Layout.parse("fsdp=64,tensor=8").mesh.num_devices
        512
        """
        values: dict[str, object] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = item.partition("=")
            if not equals:
                raise LayoutError(f"layout: {item!r} is not KEY=VALUE; write data=2,fsdp=4")
            values[key.strip()] = int(value) if value.strip().isdigit() else value.strip()
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Layout":
        """The layout with these fields; unknown ones are refused with the nearest known."""
        known = [field.name for field in fields(cls)]
        clean = dict(values)
        for key in values:
            if key not in known:
                raise LayoutError(f"layout: {key!r} is not supported; {nearest(key, known)}")
        flag = clean.get("sequence_parallel", False)
        if flag not in _FLAGS:
            raise LayoutError(f"layout: sequence_parallel = {flag!r}; fits: true, false")
        clean["sequence_parallel"] = _FLAGS[flag]
        return cls(**clean)  # pyright: ignore[reportArgumentType]

    def to_dict(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def replace(self, **changes: object) -> "Layout":
        return replace(self, **changes)

    def __str__(self) -> str:
        """The degrees above one and the schedule, as `--layout` reads them.

        >>> print(Layout(fsdp=4, tensor=2, remat="full"))
        fsdp=4,tensor=2,remat=full
        """
        parts = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1] or ["data=1"]
        if self.sequence_parallel:
            parts.append("sequence_parallel=true")
        if self.microbatches > 1:
            parts.append(f"microbatches={self.microbatches}")
        return ",".join([*parts, f"remat={self.remat}"])


@dataclass(frozen=True)
class _Rules:
    """What splits each letter, first rule first. Layouts that differ in degrees alone share them."""

    stored: Rules
    activations: Rules


@lru_cache
def _rules(batch: Axes, fsdp: Axes, tensor: Axes, positions: Axes) -> _Rules:
    wide = tuple((letter, tensor) for letter in "NKFV")
    return _Rules((*wide, ("D", fsdp)), (*wide, ("B", batch), ("T", positions)))


@lru_cache(maxsize=4096)
def _split(name: str, letters: str, rules: Rules) -> ShardedArray:
    taken: dict[str, Axes] = {}
    used: set[str] = set()
    for letter, axes in rules:
        if letter in letters:
            taken[letter] = tuple(axis for axis in axes if axis not in used)
            used |= set(axes)
    return ShardedArray(name, tuple(letters), tuple(taken.get(letter, ()) for letter in letters))


@lru_cache(maxsize=4096)
def _contraction(rules: _Rules, name: str, spec: str) -> Contraction:
    operands, _, out = spec.partition("->")
    x, w = operands.split(",")
    given, weight = _split("x", x, rules.activations), _split(name, w, rules.stored)
    product = _split(f"{name}_out", out, rules.activations)
    operation = placed((given, weight), product, wanted=True, stored=frozenset({name}))
    return contraction(spec, given, weight, product, operation.roles)


_LETTER_NAMES = {
    "N": "query heads",
    "K": "KV heads",
    "F": "feed-forward",
    "V": "vocabulary",
    "D": "model dimension",
}


def _does_not_divide(array: ShardedArray, dim: str, axes: tuple[str, ...], size: int, mesh: Mesh) -> str:
    axis = "·".join(axes)
    whole = array.replace(axes={dim: ()})
    fits = ", ".join(map(str, dividing_degrees(size, size)))
    return (
        f"{array}: {size} {_LETTER_NAMES[dim]} ({dim}) do not divide over {axis} = {mesh.size(axes)}; "
        f"fits: {axis} in {{{fits}}}, or replicate: {whole}"
    )
