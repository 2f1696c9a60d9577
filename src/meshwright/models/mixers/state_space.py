"""The state space of Mamba-2 (Dao and Gu, 2024).

Per head, with a step dt of each position:

    S = exp(-A dt) S + dt B x^T        y = C S + skip x

Source: Dao and Gu, "Transformers are SSMs", https://arxiv.org/abs/2405.21060.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from meshwright.errors import ModelError
from meshwright.models.at_layer import AtLayer
from meshwright.models.fields import check_fields
from meshwright.models.mixers.mixer import (
    CHUNK,
    AddedFlops,
    ChunkProduct,
    LoopPass,
    Loops,
    State,
    StateMixer,
    StateOps,
    V,
    biased,
    with_biases,
)
from meshwright.models.param import Param

GatedNorm = Literal["after", "before", "none"]


@dataclass(frozen=True)
class StateSpace(StateMixer):
    """num_heads of head_dim (p), in num_groups (g) that share B and C of state_dim (s); conv_width (c) taps.

    conv_bias, proj_bias: whether the convolution, and the projections, have biases. min_step: the least dt.
    norm: of a group's values, multiplied by silu(gate) "before" or "after" it; "none": only multiplied.
    """

    title: ClassVar[str] = "state space (Mamba-2)"
    runs: ClassVar[bool] = True

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int = 1
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    min_step: float | None = None
    norm: GatedNorm = "before"

    def __post_init__(self) -> None:
        check_fields(self, "state_space")
        if self.num_heads % self.num_groups:
            raise ModelError(
                f"state_space: {self.num_heads} heads do not divide over {self.num_groups} groups"
            )

    @property
    def _groups(self) -> str:
        """g, unless there is one group: its heads are then split, and its B and C are whole."""
        return "g" if self.num_groups > 1 else ""

    def sizes(self, d_model: int) -> dict[str, int]:
        sizes = {
            "u": self.num_heads // self.num_groups,
            "s": self.state_dim,
            "p": self.head_dim,
            "c": self.conv_width,
            "t": self.conv_width - 1,
        }
        return sizes | ({"g": self.num_groups} if self._groups else {})

    def params(self) -> dict[str, Param]:
        g = self._groups
        values, keys, heads = f"{g}up", f"{g}s", f"{g}u"
        params = {
            "state_gate": Param(f"D{values}"),
            "state_x": Param(f"D{values}"),
            "state_b": Param(f"D{keys}"),
            "state_c": Param(f"D{keys}"),
            "state_step": Param(f"D{heads}"),
            "conv_x": Param(f"{values}c", "taps", "c"),
            "conv_b": Param(f"{keys}c", "taps", "c"),
            "conv_c": Param(f"{keys}c", "taps", "c"),
            "step_bias": Param(heads, "ones"),
            "decay_log": Param(heads, "decay"),
            "skip": Param(heads, "ones"),
            "state_out": Param(f"{values}D", fan_in=values),
        }
        if self.norm != "none":
            params["state_norm"] = Param(values, "ones")
        if self.conv_bias:
            params |= with_biases(params, {"conv_x": values, "conv_b": keys, "conv_c": keys})
        if self.proj_bias:
            into = {"state_gate": values, "state_x": values, "state_b": keys, "state_c": keys}
            params |= with_biases(params, into | {"state_step": heads, "state_out": "D"})
        return params

    def states(self) -> dict[str, State]:
        g = self._groups
        return {
            "state": State(f"B{g}usp", "f32"),
            "conv_x": State(f"B{g}upt"),
            "conv_b": State(f"B{g}st"),
            "conv_c": State(f"B{g}st"),
        }

    def chunk_products(self, d_model: int, chunk: float = CHUNK) -> tuple[ChunkProduct, ...]:
        """C . B for each group; for each head, these by values, a read of the state, and its update."""
        heads, s, p = self.num_heads, self.state_dim, self.head_dim
        return (
            ChunkProduct(self.num_groups, chunk, s, chunk),
            ChunkProduct(heads, chunk, chunk, p),
            ChunkProduct(heads, chunk, s, p),
            ChunkProduct(heads, s, chunk, p),
        )

    def backward_flops(self, d_model: int, chunk: float = CHUNK) -> float:
        """Two products for each; the states and C . B are computed again."""
        s, p = self.state_dim, self.head_dim
        again = self.num_groups * 2 * chunk * s + self.num_heads * 2 * s * p
        return 2 * self.chunk_flops(d_model, chunk) + again

    def shared_flops(self, d_model: int, chunk: float = CHUNK) -> AddedFlops:
        """C . B of a single group, which all devices that split its heads compute."""
        forward = 2 * chunk * self.state_dim if self.num_groups == 1 else 0.0
        return AddedFlops(forward, 3 * forward)

    def loops(self) -> Loops:
        """Counted for Codestral Mamba (Mamba-2) and Falcon-H1, with the same figures."""
        return Loops(LoopPass(15, 1.25), LoopPass(48, 4.7))

    def step_flops(self, d_model: int) -> float:
        """5 s p for each head: the state is decayed, written and read."""
        return 5 * self.num_heads * self.state_dim * self.head_dim

    def mix(
        self, ops: StateOps[V], w: Mapping[str, V], h: V, at: AtLayer, *, norm_eps: float
    ) -> tuple[V, AtLayer]:
        g = self._groups
        values, keys, heads = f"{g}up", f"{g}s", f"{g}u"
        into = {"state_gate": values, "state_x": values, "state_b": keys, "state_c": keys}
        into |= {"state_step": heads}
        products = ops.einsums(h, w, **{name: f"BTD,D{out}->BT{out}" for name, out in into.items()})
        gate, x, b, c, step = (biased(ops, w, name, y) for name, y in zip(into, products, strict=True))
        if not g:
            b, c = ops.all_positions("state_b", b), ops.all_positions("state_c", c)

        def convolved(name: str, x: V, at: AtLayer) -> tuple[V, AtLayer]:
            bias = w.get(f"{name}_bias")
            return ops.convolution(name, x, w[name], bias, at, memory=name)

        x, at = convolved("conv_x", x, at)
        b, at = convolved("conv_b", b, at)
        c, at = convolved("conv_c", c, at)
        if not g:
            b, c = (ops.for_heads("state_space", each) for each in (b, c))
        per_head = f"BT{heads},{heads}->BT{heads}"
        step = ops.apply("step", "step", per_head, step, w["step_bias"], least=self.min_step)
        decay = ops.apply("decay", "decayed_step", per_head, step, w["decay_log"])
        v = ops.apply("step_x", "times", f"BT{values},BT{heads}->BT{values}", x, step)
        y, at = ops.recurrence("state_space", c, b, v, decay, None, at)
        of_values = f"BT{values}"
        y = ops.apply("skip", "skipped", f"{of_values},{of_values},{heads}->{of_values}", y, x, w["skip"])
        if self.norm == "none":
            y = ops.apply("gate", "gated", f"{of_values},{of_values}->{of_values}", y, gate)
        else:
            spec = f"{of_values},{of_values},{values}->{of_values}"
            function = {"before": "gated_and_normed", "after": "normed_and_gated"}[self.norm]
            y = ops.apply("state_norm", function, spec, y, gate, w["state_norm"], eps=norm_eps, normed="up")
        (y,) = ops.einsums(y, w, state_out=f"{of_values},{values}D->BTD")
        return biased(ops, w, "state_out", y), at
