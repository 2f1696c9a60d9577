"""The selective state space of Mamba (Gu and Dao, 2023), with a decay for each channel and element.

    S = exp(-A dt) S + dt B x        y = C S + skip x

Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
https://arxiv.org/abs/2312.00752.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from meshwright.models.at_layer import AtLayer
from meshwright.models.fields import check_fields
from meshwright.models.mixers.mixer import (
    CHUNK,
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


@dataclass(frozen=True)
class Selective(StateMixer):
    """width channels (u, each a head of one value) with state_dim (s) elements; steps of rank step_rank (r).

    conv_width (c) taps. conv_bias, proj_bias: whether the convolution, and the projections, have biases.
    norms: whether steps, B and C are normed (Jamba). plain_norm_eps: the epsilon of such norms without scales
    (Falcon Mamba).
    """

    title: ClassVar[str] = "selective state space (Mamba)"
    runs: ClassVar[bool] = True
    written_every: ClassVar[int] = 1

    width: int
    state_dim: int
    step_rank: int
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    norms: bool = False
    plain_norm_eps: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "selective")

    def sizes(self, d_model: int) -> dict[str, int]:
        return {
            "u": self.width,
            "p": 1,
            "s": self.state_dim,
            "r": self.step_rank,
            "c": self.conv_width,
            "t": self.conv_width - 1,
        }

    def params(self) -> dict[str, Param]:
        params = {
            "state_gate": Param("Du"),
            "state_x": Param("Du"),
            "conv_x": Param("uc", "taps", "c"),
            "state_down": Param("ur", fan_in="u"),
            "state_b": Param("us", fan_in="u"),
            "state_c": Param("us", fan_in="u"),
            "state_step": Param("ru", fan_in="r"),
            "step_bias": Param("u", "ones"),
            "decay_log": Param("us", "decay"),
            "skip": Param("u", "ones"),
            "state_out": Param("uD", fan_in="u"),
        }
        if self.conv_bias:
            params |= with_biases(params, {"conv_x": "u"})
        if self.proj_bias:
            params |= with_biases(params, {"state_gate": "u", "state_x": "u", "state_out": "D"})
        if self.norms:
            params |= {"step_norm": Param("r", "ones"), "b_norm": Param("s", "ones")}
            params["c_norm"] = Param("s", "ones")
        return params

    def states(self) -> dict[str, State]:
        return {"state": State("Bus", "f32"), "conv_x": State("But")}

    def chunk_flops(self, d_model: int, chunk: float = CHUNK) -> float:
        """2 for each channel and element, of C S: decays differ, so that no other part is a product."""
        return 2 * self.width * self.state_dim

    def backward_flops(self, d_model: int, chunk: float = CHUNK) -> float:
        """The product for the gradient of C."""
        return self.chunk_flops(d_model, chunk)

    def chunk_bytes(self, d_model: int, chunk: float = CHUNK) -> float:
        """Bytes per token of the states at all positions of a chunk, in float32."""
        return 4 * self.width * self.state_dim

    def loops(self) -> Loops:
        """Counted for Falcon Mamba."""
        return Loops(LoopPass(25, 2.2), LoopPass(72, 11.3))

    def step_flops(self, d_model: int) -> float:
        """7 operations for each channel and element: decay, its exponential, input and sum."""
        return 7 * self.width * self.state_dim

    def mix(
        self, ops: StateOps[V], w: Mapping[str, V], h: V, at: AtLayer, *, norm_eps: float
    ) -> tuple[V, AtLayer]:
        into = {"state_gate": "BTD,Du->BTu", "state_x": "BTD,Du->BTu"}
        products = ops.einsums(h, w, **into)
        gate, x = (biased(ops, w, name, y) for name, y in zip(into, products, strict=True))
        x, at = ops.convolution("conv_x", x, w["conv_x"], w.get("conv_x_bias"), at, memory="conv_x")
        down, b, c = ops.einsums(x, w, state_down="BTu,ur->BTr", state_b="BTu,us->BTs", state_c="BTu,us->BTs")
        down = self._normed(ops, w, "step_norm", down, "r", norm_eps)
        b = ops.all_positions("state_b", self._normed(ops, w, "b_norm", b, "s", norm_eps))
        c = ops.all_positions("state_c", self._normed(ops, w, "c_norm", c, "s", norm_eps))
        b, c = (ops.for_heads("selective", each) for each in (b, c))
        (step,) = ops.einsums(down, w, state_step="BTr,ru->BTu")
        step = ops.apply("step", "step", "BTu,u->BTu", step, w["step_bias"], least=None)
        v = ops.apply("step_x", "times", "BTu,BTu->BTu", x, step)
        y, at = ops.recurrence("selective", c, b, v, step, None, at, w["decay_log"])
        y = ops.apply("skip", "skipped", "BTu,BTu,u->BTu", y, x, w["skip"])
        y = ops.apply("gate", "gated", "BTu,BTu->BTu", y, gate)
        (y,) = ops.einsums(y, w, state_out="BTu,uD->BTD")
        return biased(ops, w, "state_out", y), at

    def _normed(
        self, ops: StateOps[V], w: Mapping[str, V], name: str, x: V, letter: str, norm_eps: float
    ) -> V:
        """x[B, T, letter], normed if the mixer says so."""
        array = f"BT{letter}"
        if self.norms:
            spec = f"{array},{letter}->{array}"
            return ops.apply(name, "rms", spec, x, w[name], eps=norm_eps, normed=letter)
        if self.plain_norm_eps is not None:
            return ops.apply(name, "rms", f"{array}->{array}", x, eps=self.plain_norm_eps, normed=letter)
        return x
