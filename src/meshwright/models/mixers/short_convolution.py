"""The gated short convolution of LFM2: y = C conv(B x), with B, C and x projected from the input.

Source: Liquid AI, "LFM2 technical report", https://arxiv.org/abs/2511.23404.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from meshwright.models.at_layer import AtLayer
from meshwright.models.fields import check_fields
from meshwright.models.mixers.mixer import CHUNK, State, StateMixer, StateOps, V, biased, with_biases
from meshwright.models.param import Param

_INTO = ("state_b", "state_c", "state_x")


@dataclass(frozen=True)
class ShortConvolution(StateMixer):
    """width (c): taps of the convolution over D channels (i). bias: of it and of the projections."""

    title: ClassVar[str] = "short convolution"
    runs: ClassVar[bool] = True

    width: int = 3
    bias: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "short_convolution")

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"i": d_model, "c": self.width, "t": self.width - 1}

    def params(self) -> dict[str, Param]:
        params = {name: Param("Di") for name in _INTO}
        params |= {"conv_x": Param("ic", "taps", "c"), "state_out": Param("iD", fan_in="i")}
        if self.bias:
            outer = dict.fromkeys((*_INTO, "conv_x"), "i") | {"state_out": "D"}
            params |= with_biases(params, outer)
        return params

    def states(self) -> dict[str, State]:
        return {"conv_x": State("Bit")}

    def chunk_flops(self, d_model: int, chunk: float = CHUNK) -> float:
        return 0.0

    def step_flops(self, d_model: int) -> float:
        return 0.0

    def mix(
        self, ops: StateOps[V], w: Mapping[str, V], h: V, at: AtLayer, *, norm_eps: float
    ) -> tuple[V, AtLayer]:
        products = ops.einsums(h, w, **dict.fromkeys(_INTO, "BTD,Di->BTi"))
        b, c, x = (biased(ops, w, name, y) for name, y in zip(_INTO, products, strict=True))
        x = ops.apply("input_gate", "times", "BTi,BTi->BTi", b, x)
        x, at = ops.convolution(
            "conv_x",
            x,
            w["conv_x"],
            w.get("conv_x_bias"),
            at,
            memory="conv_x",
            activated=False,
        )
        y = ops.apply("output_gate", "times", "BTi,BTi->BTi", c, x)
        (y,) = ops.einsums(y, w, state_out="BTi,iD->BTD")
        return biased(ops, w, "state_out", y), at
