"""The real-gated linear recurrent unit of Griffin and RecurrentGemma (RG-LRU): one state value per channel.

    a = exp(-8 softplus(rate) sigmoid(W_a x))        h = a h + sqrt(1 - a^2) sigmoid(W_i x) x

x comes from a projection and a convolution; the result is gated by another projection. W_a and W_i are
block-diagonal. At the first position of a document, h = sigmoid(W_i x) x.
Source: De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language
Models", https://arxiv.org/abs/2402.19427.
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

_INTO = ("state_gate", "state_x")
# Weights of block-diagonal products, which are too small to gain from a narrow type.
BLOCK_GATES = ("input_gate", "decay_gate")


@dataclass(frozen=True)
class LinearUnit(StateMixer):
    """num_blocks (g) of block_width channels (u); each channel is a head of one key and one value element.

    A gate of a block (channels o) reads all channels u of the block. conv_width (c): taps of the convolution.
    """

    title: ClassVar[str] = "gated linear recurrent unit (RG-LRU)"
    runs: ClassVar[bool] = True
    written_every: ClassVar[int] = 1

    num_blocks: int
    block_width: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        check_fields(self, "linear_unit")

    def sizes(self, d_model: int) -> dict[str, int]:
        return {
            "g": self.num_blocks,
            "u": self.block_width,
            "o": self.block_width,
            "s": 1,
            "p": 1,
            "c": self.conv_width,
            "t": self.conv_width - 1,
        }

    def params(self) -> dict[str, Param]:
        params = {
            "state_gate": Param("Dgu"),
            "state_x": Param("Dgu"),
            "conv_x": Param("guc", "taps", "c"),
            **{name: Param("guo", fan_in="u") for name in BLOCK_GATES},
            "decay_rate": Param("gu", "slow_decay"),
            "state_out": Param("guD", fan_in="gu"),
        }
        outer = dict.fromkeys((*_INTO, "conv_x"), "gu") | dict.fromkeys(BLOCK_GATES, "go")
        return params | with_biases(params, outer | {"state_out": "D"})

    def states(self) -> dict[str, State]:
        return {"state": State("Bgu", "f32"), "conv_x": State("Bgut")}

    def chunk_flops(self, d_model: int, chunk: float = CHUNK) -> float:
        """Zero: decays differ from channel to channel, so that no part is a product."""
        return 0.0

    def chunk_bytes(self, d_model: int, chunk: float = CHUNK) -> float:
        """Bytes per token of the states at all positions, in float32; there are no products."""
        return 4 * self.num_blocks * self.block_width

    def loops(self) -> Loops:
        """Counted for RecurrentGemma."""
        return Loops(LoopPass(10, 6.2), LoopPass(23, 14.2))

    def step_flops(self, d_model: int) -> float:
        """2 for each channel: the decayed state plus the input."""
        return 2 * self.num_blocks * self.block_width

    def mix(
        self, ops: StateOps[V], w: Mapping[str, V], h: V, at: AtLayer, *, norm_eps: float
    ) -> tuple[V, AtLayer]:
        products = ops.einsums(h, w, **dict.fromkeys(_INTO, "BTD,Dgu->BTgu"))
        gate, x = (biased(ops, w, name, y) for name, y in zip(_INTO, products, strict=True))
        x, at = ops.convolution(
            "conv_x", x, w["conv_x"], w["conv_x_bias"], at, memory="conv_x", activated=False
        )
        into = dict.fromkeys(BLOCK_GATES, "BTgu,guo->BTgo")
        products = ops.einsums(x, w, **into)
        of_input, of_decay = (biased(ops, w, name, y) for name, y in zip(into, products, strict=True))
        # The channels o of a gate are the channels u of the array that it multiplies.
        v = ops.apply("gated_input", "times_sigmoid", "BTgu,BTgu->BTgu", x, of_input)
        decay = ops.apply("decay", "slow_decay", "BTgu,gu->BTgu", of_decay, w["decay_rate"])
        y, at = ops.linear_unit("linear_unit", v, decay, at)
        y = ops.apply("gate", "gated_by_gelu", "BTgu,BTgu->BTgu", y, gate)
        (y,) = ops.einsums(y, w, state_out="BTgu,guD->BTD")
        return biased(ops, w, "state_out", y), at
