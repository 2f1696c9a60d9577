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
from functools import cached_property

from meshwright.errors import LayoutError
from meshwright.layout.fields import AXES, DEGREES, FLAG_FIELDS, check_values, clean_fields, read_fields
from meshwright.layout.fit import check_batch, check_stages, check_weights
from meshwright.layout.rules import (
    Rules,
    gathered_positions,
    is_matrix,
    make_rules,
    planned_contraction,
    split,
)
from meshwright.models.config import ModelConfig
from meshwright.notation.array import Axes, ShardedArray, dividing_degrees
from meshwright.notation.einsum import Contraction, Reshard
from meshwright.notation.mesh import Mesh


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh axes, and the schedule of a step.

    data: replicas of the weights. fsdp: data ranks that share what `zero` says. context: shards of
    each sequence, whose keys and values travel by `context_method` ("allgather" or "ring"). tensor:
    Megatron's tensor parallelism. tensor2: a second one, over D. pipe: stages of layers. expert:
    devices that share the experts, out of data·fsdp.
    zero: what is sharded over fsdp (over data where fsdp is 1): 1 the optimizer, 2 and the gradients,
    3 and the weights, gathered before use; 3 by default where fsdp is above 1, else 0 (replicas).
    zero_context: the ranks of `context` share that too.
    sequence_parallel: split T of the residual stream over `tensor`. microbatches: of one step;
    without stages they accumulate gradients. schedule, interleave: of the pipeline; chunks a stage.
    remat: what the backward pass recomputes ("none", the scores of "attention", all but "matmuls" and
    attention, "alternate" ones of these matmuls as well, the "full" block). offload: saved activations
    wait in the host's memory.
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
    zero_context: bool = False
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
        check_values(self)
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
        with_expert = ("expert",) if cut > 1 and home == shared else ()
        return self._present(shared) + with_expert + (self._present("context") if self.zero_context else ())

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

    @cached_property
    def pattern(self) -> tuple[Rules, int]:
        """What layouts share that differ in sizes alone: their operations and collectives are the same."""
        return self._rules, self.zero_stage

    def _present(self, *axes: str) -> Axes:
        """Axes of size one split nothing and are left out of every array."""
        return tuple(axis for axis in axes if self.mesh.sizes.get(axis, 1) > 1)

    @cached_property
    def _rules(self) -> Rules:
        present = self._present
        positions = present("context") + (present("tensor") if self.sequence_parallel else ())
        return make_rules(
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
        return split(name, letters, self._rules.stored if is_matrix(letters) else ())

    def gradient(self, name: str, letters: str) -> ShardedArray:
        """The sharding of a weight's moments and of its gradient once summed (ZeRO 1 and above)."""
        return split(name, letters, self._rules.updated if is_matrix(letters) else ())

    def activation(self, name: str, letters: str) -> ShardedArray:
        """The sharding of an activation (or a cache) with these letters."""
        return split(name, letters, self._rules.activations)

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

    def keys(self, name: str, letters: str = "BTKH") -> Reshard:
        """Keys (or values) from k[B, T_context, K, H], as projected, to T whole, as attention reads them.

        Every shard of the queries adds to their cotangents.
        """
        return gathered_positions(self._rules, name, letters)

    def contraction(self, name: str, spec: str) -> Contraction:
        """The contraction of an activation with the weight `name`, as moves the fewest arrays.

        >>> print(*Layout(fsdp=4).contraction("wq", "BTD,DNH->BTNH").steps)
        AllGather_{fsdp} wq[D_fsdp, N, H] -> wq[D, N, H]
        """
        return planned_contraction(self._rules, name, spec)

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
        check_weights(self, config, pad_vocabulary=pad_vocabulary)
        check_stages(self, config)
        check_batch(self, num_sequences, seq_len)

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The layout written `data=2,fsdp=64,tensor=8,remat=full`.

        >>> Layout.parse("fsdp=64,tensor=8").mesh.num_devices
        512
        """
        return cls.from_dict(read_fields(text))

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
            for key, value in read_fields(text).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Layout":
        """The layout with these fields; unknown ones are refused with the nearest known."""
        known = [field.name for field in fields(cls)]
        return cls(**clean_fields(values, known))  # pyright: ignore[reportArgumentType]

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
        for name in ("zero", *FLAG_FIELDS, "context_method", "microbatches", "schedule", "interleave"):
            value = getattr(self, name)
            if value != getattr(default, name) or (name == "schedule" and self.pipe > 1):
                parts.append(f"{name}={str(value).lower()}")
        return ",".join([*parts, f"remat={self.remat}"])
