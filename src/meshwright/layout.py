"""A Layout: which mesh axes split the named axes of weights and activations, and the schedule.

The planner emits it, the runner takes it, the audit checks it. It is a few degrees
(`data=2,fsdp=4,tensor=1`) and the rules that follow from them:

    weights      stored D_fsdp and N, K, F, V_tensor; a weight stays split over `tensor` while it
                 is used and is gathered over `fsdp` before
    activations  B_{data,fsdp}; T_context; N, K, F, V_tensor; with sequence parallelism T also takes
                 `tensor` where no other dimension does. Keys and values are gathered over `context`
    experts      E_expert, an axis cut out of the data ranks (`fsdp`, or `data` where fsdp is 1);
                 where there are more ranks to an expert group than data ranks, E takes `tensor` too
    2D tensor    D_tensor2 of weights and activations alike
    norms        whole on every device: they are too small to be worth a gather

A rule earlier in the list wins an axis, so h[B,T,F] has F_tensor and x[B,T,D] has T_tensor. Layers
are split over `pipe` by the schedule, which no array's sharding shows.
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

# The axes that every mesh has, outermost first, and those that only some layouts use.
AXES = ("data", "fsdp", "context", "tensor")
DEGREES = ("pipe", "data", "fsdp", "expert", "context", "tensor2", "tensor")
REMATS = ("none", "attention", "matmuls", "full")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe")
CONTEXT_METHODS = ("allgather", "ring")
DTYPES = ("f32", "bf16")
MATMUL_DTYPES = ("f32", "bf16", "f16", "fp8", "int8", "fp4")
# How a flag may be written; True and 1 are the same key.
_FLAGS: dict[object, bool] = {True: True, "true": True, "on": True, False: False, "false": False}
_FLAG_FIELDS = ("sequence_parallel", "offload", "master_weights")


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh axes, and the schedule of a step.

    data: replicas of the weights. fsdp: data ranks that share what `zero` says. context: shards of
    each sequence, whose keys and values travel by `context_method` ("allgather" or "ring"). tensor:
    Megatron's tensor parallelism. tensor2: a second one, over D. pipe: stages of layers. expert:
    devices that share the experts, out of data·fsdp.
    zero: what is sharded over fsdp (over data where fsdp is 1): 1 the optimizer, 2 and the gradients,
    3 and the weights, gathered before use; 3 by default where fsdp is above 1, else 0 (replicas).
    sequence_parallel: split T of the residual stream over `tensor`. microbatches: of one step;
    without stages they accumulate gradients. schedule, interleave: of the pipeline; chunks a stage.
    remat: what the backward pass recomputes ("none", the scores of "attention", all but "matmuls",
    "full" block). offload: saved activations wait in the host's memory.
    weights_dtype: of the stored weights; gradients_dtype: of gradients (the weights' by default);
    optimizer_dtype: of Adam's two moments; master_weights: a float32 copy beside the weights;
    compute_dtype: of activations and gathers; matmul_dtype: of matmuls alone (by default the same).

    >>> layout = Layout(data=2, fsdp=2, tensor=2)
    >>> print(layout.weight("wq", "DNH"), layout.activation("x", "BTD"))
    wq[D_fsdp, N_tensor, H] x[B_{data,fsdp}, T, D]
    """

    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    tensor2: int = 1
    pipe: int = 1
    expert: int = 1
    zero: int | None = None
    context_method: str = "allgather"
    microbatches: int = 1
    schedule: str = "1f1b"
    interleave: int = 1
    remat: str = "none"
    offload: bool = False
    weights_dtype: str = "bf16"
    compute_dtype: str = "bf16"
    matmul_dtype: str | None = None
    gradients_dtype: str | None = None
    optimizer_dtype: str = "f32"
    master_weights: bool = False

    def __post_init__(self) -> None:
        for name in (*DEGREES, "microbatches", "interleave"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(f"layout: {name} = {value!r}; it must be a positive integer")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise LayoutError(
                    f"layout: {name} = {getattr(self, name)!r}; {nearest(getattr(self, name), list(known))}"
                )
        for name, fits in _DTYPE_FIELDS.items():
            value = getattr(self, name)
            if value not in fits and not (value is None and name in ("matmul_dtype", "gradients_dtype")):
                raise LayoutError(f"layout: {name} = {value!r}; fits: {', '.join(fits)}")
        if self.zero not in (None, 0, 1, 2, 3) or isinstance(self.zero, bool):
            raise LayoutError(f"layout: zero = {self.zero!r}; fits: 0, 1, 2, 3")
        if self.zero == 3 and self.fsdp == 1 and self.data > 1:
            raise LayoutError(
                f"layout: zero = 3 shards the weights; write fsdp={self.data} for data={self.data}"
            )
        if self.zero == 0 and self.fsdp > 1:
            raise LayoutError(f"layout: zero = 0 shards nothing; write data={self.fsdp} for fsdp={self.fsdp}")
        if self.interleave > 1 and self.pipe == 1:
            raise LayoutError(
                f"layout: interleave = {self.interleave} chunks a stage with pipe = 1; fits: pipe above 1"
            )
        if self.interleave > 1 and self.schedule == "1f1b":
            object.__setattr__(self, "schedule", "interleaved")  # what 1F1B over chunks is called
        self._expert_home  # noqa: B018 - raises where no data axis divides over the experts

    @cached_property
    def mesh(self) -> Mesh:
        """The axes in DEGREES' order; `expert` is cut out of `fsdp` or `data`."""
        home, cut = self._expert_home
        sizes = {axis: getattr(self, axis) for axis in DEGREES}
        sizes["expert"] = cut
        sizes[home] //= cut
        return Mesh({axis: size for axis, size in sizes.items() if size > 1 or axis in AXES})

    @cached_property
    def _expert_home(self) -> tuple[str, int]:
        """(the axis that the experts' devices are cut out of, how many of it)."""
        for cut in (self.expert, self.expert // self.tensor if self.expert % self.tensor == 0 else 0):
            for home in ("fsdp", "data"):
                if cut and getattr(self, home) % cut == 0:
                    return home, cut
        ranks = self.data * self.fsdp
        fits = ", ".join(map(str, dividing_degrees(ranks, ranks)))
        raise LayoutError(
            f"layout: expert = {self.expert} does not divide the data ranks data·fsdp = {self.data}·"
            f"{self.fsdp} = {ranks}; fits: expert in {{{fits}}}"
        )

    @cached_property
    def expert_axes(self) -> Axes:
        """The axes that split the experts."""
        cut = self._expert_home[1]
        return (("expert",) if cut > 1 else ()) + (
            ("tensor",) if self.expert > cut and self.tensor > 1 else ()
        )

    @cached_property
    def batch_axes(self) -> Axes:
        """The axes that split the sequences of a batch."""
        return self._present("data", "fsdp", "expert")

    @cached_property
    def zero_stage(self) -> int:
        """`zero`, or what it is by default."""
        return (3 if self.fsdp > 1 else 0) if self.zero is None else self.zero

    @cached_property
    def zero_axes(self) -> Axes:
        """The axes over which the data ranks share what `zero` says."""
        if self.zero_stage == 0:
            return ()
        shared = "fsdp" if self.fsdp > 1 else "data"
        home, cut = self._expert_home
        return self._present(shared) + (("expert",) if cut > 1 and home == shared else ())

    @cached_property
    def weight_axes(self) -> Axes:
        """The axes that split some gradient: over them a norm of the gradients is summed."""
        split = {"tensor", "tensor2", "expert", "pipe"} | (
            set(self.zero_axes) if self.zero_stage >= 1 else set()
        )
        return tuple(axis for axis in self.mesh if axis in split and self.mesh.size(axis) > 1)

    @property
    def num_batch_shards(self) -> int:
        return self.data * self.fsdp

    @property
    def num_chips(self) -> int:
        return self.mesh.num_devices

    def _present(self, *axes: str) -> Axes:
        """Axes of size one split nothing and are left out of every array."""
        return tuple(axis for axis in axes if self.mesh.sizes.get(axis, 1) > 1)

    @cached_property
    def _rules(self) -> "_Rules":
        present = self._present
        positions = present("context") + (present("tensor") if self.sequence_parallel else ())
        return _rules(
            self.batch_axes,
            self.zero_axes,
            self.zero_stage,
            self.expert_axes,
            present("tensor"),
            present("tensor2"),
            positions,
        )

    def weight(self, name: str, letters: str) -> ShardedArray:
        """The sharding in which a weight is stored."""
        return _split(name, letters, self._rules.stored if _is_matrix(letters) else ())

    def gradient(self, name: str, letters: str) -> ShardedArray:
        """The sharding of a weight's moments and of its gradient once summed (ZeRO 1 and above)."""
        return _split(name, letters, self._rules.updated if _is_matrix(letters) else ())

    def activation(self, name: str, letters: str) -> ShardedArray:
        """The sharding of an activation (or a cache) with these letters."""
        return _split(name, letters, self._rules.activations)

    def routed(self, name: str) -> ShardedArray:
        """d[E, C, D] as the tokens' own devices sort them by expert, before they travel.

        An expert's tokens have no order: the axes that E takes are innermost, so one AllToAll moves them.
        """
        tokens = self.activation(name, "BTD")
        taken = tuple(axis for axes in tokens.axes[:2] for axis in axes)
        rows = tuple(sorted(taken, key=lambda axis: axis in self.expert_axes))
        return ShardedArray(name, ("E", "C", "D"), ((), rows, tokens.axes[2]))

    def tokens(self, name: str) -> ShardedArray:
        """The sharding of tokens, targets and positions: x[B, T]'s, but whole over `tensor`."""
        array = self.activation(name, "BT")
        return array.replace(axes={"T": self._present("context")})

    def keys(self, name: str, letters: str = "BTKH") -> Route:
        """Keys (or values) from k[B, T_context, K, H], as projected, to T whole, as attention reads them.

        Every shard of the queries adds to their cotangents.
        """
        projected = self.activation(name, letters)
        whole = projected.replace(axes={"T": ()})
        return Route(projected, whole, cotangent(whole).replace(unreduced=projected.axes_of("T")))

    def contraction(self, name: str, spec: str) -> Contraction:
        """The contraction of an activation with the weight `name`, as moves the fewest arrays.

        >>> print(*Layout(fsdp=4).contraction("wq", "BTD,DNH->BTNH").steps)
        AllGather_{fsdp} wq[D_fsdp, N, H] -> wq[D, N, H]
        """
        return _contraction(self._rules, name, spec)

    def check(
        self,
        config: ModelConfig,
        num_sequences: int | None = None,
        seq_len: int | None = None,
        *,
        pad_vocabulary: bool = False,
    ) -> None:
        """Raises LayoutError where the model's dimensions, the batch or the sequence do not divide.

        pad_vocabulary: V may be padded to a multiple, as a planner may assume and a run may not.
        """
        sizes = dimensions(config)
        for path, param in parameters(config).items():
            array = self.weight(path.rpartition("/")[2], param.letters)
            for dim, axes in zip(array.dims, array.axes, strict=True):
                if sizes[dim] % self.mesh.size(axes) and not (dim == "V" and pad_vocabulary):
                    raise LayoutError(_does_not_divide(array, dim, axes, sizes[dim], self.mesh))
        self._check_stages(config)
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

    def _check_stages(self, config: ModelConfig) -> None:
        layers, chunks = config.num_layers, self.pipe * self.interleave
        if chunks > layers + _CHUNKS_WITHOUT_LAYERS:
            fit = (layers + _CHUNKS_WITHOUT_LAYERS) // self.pipe
            most = f"interleave up to {fit}" if self.pipe <= layers else f"pipe up to {layers}"
            raise LayoutError(
                f"{config.name}: {layers} layers (L) are fewer than the chunks of pipe·interleave = "
                f"{self.pipe}·{self.interleave} = {chunks}; fits: {most}"
            )
        experts = dimensions(config).get("E", 1)
        if experts == 1 and self.expert > 1:
            raise LayoutError(
                f"{config.name} has no experts (E) for expert = {self.expert}; fits: expert in {{1}}"
            )
        if experts % self.expert:
            fits = ", ".join(map(str, dividing_degrees(experts, experts)))
            raise LayoutError(
                f"{config.name}: {experts} experts (E) do not divide over expert = {self.expert}; "
                f"fits: expert in {{{fits}}}"
            )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The layout written `data=2,fsdp=64,tensor=8,remat=full`.

        >>> Layout.parse("fsdp=64,tensor=8").mesh.num_devices
        512
        """
        return cls.from_dict(_fields(text))

    @classmethod
    def parse_fields(cls, text: str) -> dict[str, object]:
        """The fields that such a text names, checked one by one.

        >>> Layout.parse_fields("tensor=8,offload=true")
        {'tensor': 8, 'offload': True}
        """
        # What these two need besides, to be degrees of any layout.
        company = {"expert": "data", "interleave": "pipe"}
        return {
            key: getattr(cls.from_dict({key: value, company.get(key, key): value}), key)
            for key, value in _fields(text).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Layout":
        """The layout with these fields; unknown ones are refused with the nearest known."""
        known = [field.name for field in fields(cls)]
        clean = dict(values)
        for key in values:
            if key not in known:
                raise LayoutError(f"layout: {key!r} is not supported; {nearest(key, known)}")
        for name in _FLAG_FIELDS:
            flag = clean.get(name, False)
            if flag not in _FLAGS:
                raise LayoutError(f"layout: {name} = {flag!r}; fits: true, false")
            clean[name] = _FLAGS[flag]
        return cls(**clean)  # pyright: ignore[reportArgumentType]

    def to_dict(self) -> dict[str, object]:
        """Every field that is not None; `from_dict` reads it back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def replace(self, **changes: object) -> "Layout":
        return replace(self, **changes)

    def __str__(self) -> str:
        """The degrees above one and the schedule, as `--layout` reads them.

        >>> print(Layout(fsdp=4, tensor=2, remat="full"))
        fsdp=4,tensor=2,remat=full
        """
        default = Layout()
        parts = [f"{axis}={getattr(self, axis)}" for axis in DEGREES if getattr(self, axis) > 1] or ["data=1"]
        for name in ("zero", *_FLAG_FIELDS, "context_method", "microbatches", "schedule", "interleave"):
            value = getattr(self, name)
            if value != getattr(default, name) or (name == "schedule" and self.pipe > 1):
                parts.append(f"{name}={str(value).lower()}")
        return ",".join([*parts, f"remat={self.remat}"])


# The first chunk may hold the embedding alone, and the last the head.
_CHUNKS_WITHOUT_LAYERS = 2


def _fields(text: str) -> dict[str, object]:
    """KEY=VALUE, ... as a dictionary; whole numbers as such."""
    values: dict[str, object] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            raise LayoutError(f"layout: {item!r} is not KEY=VALUE; write data=2,fsdp=4")
        values[key.strip()] = int(value) if value.strip().isdigit() else value.strip()
    return values


_CHOICES = {"remat": REMATS, "schedule": SCHEDULES, "context_method": CONTEXT_METHODS}
_DTYPE_FIELDS = {
    "weights_dtype": DTYPES,
    "compute_dtype": DTYPES,
    "matmul_dtype": MATMUL_DTYPES,
    "gradients_dtype": DTYPES,
    "optimizer_dtype": (*DTYPES, "fp8", "int8"),
}


@dataclass(frozen=True)
class _Rules:
    """What splits each letter, first rule first. Layouts that differ in degrees alone share them."""

    stored: Rules
    updated: Rules
    activations: Rules


@lru_cache
def _rules(
    batch: Axes, zero_axes: Axes, zero: int, experts: Axes, tensor: Axes, tensor2: Axes, positions: Axes
) -> _Rules:
    wide = (("E", experts), *((letter, tensor) for letter in "NKFMUV"))
    sharded = (*wide, ("D", tensor2 + zero_axes))
    stored = sharded if zero == 3 else (*wide, ("D", tensor2))
    activations = (*wide, ("D", tensor2), ("B", batch), ("T", positions), ("C", batch + positions))
    return _Rules(stored, sharded, activations)


def _is_matrix(letters: str) -> bool:
    """Whether a weight is more than one vector a layer."""
    return len(letters.translate(_WITHOUT_LAYERS)) > 1


_WITHOUT_LAYERS = str.maketrans("", "", "LP")


@lru_cache(maxsize=4096)
def _split(name: str, letters: str, rules: Rules) -> ShardedArray:
    taken: dict[str, Axes] = {}
    used: set[str] = set()
    for letter, axes in rules:
        # A router's scores have an entry for every expert: only what is an expert's own is split.
        if letter in letters and (letter != "E" or "M" in letters or "C" in letters):
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
    "E": "experts",
    "M": "an expert's feed-forward",
    "U": "shared feed-forward",
}


def _does_not_divide(array: ShardedArray, dim: str, axes: tuple[str, ...], size: int, mesh: Mesh) -> str:
    axis = "·".join(axes)
    whole = array.replace(axes={dim: ()})
    fits = ", ".join(map(str, dividing_degrees(size, size)))
    return (
        f"{array}: {size} {_LETTER_NAMES[dim]} ({dim}) do not divide over {axis} = {mesh.size(axes)}; "
        f"fits: {axis} in {{{fits}}}, or replicate: {whole}"
    )
