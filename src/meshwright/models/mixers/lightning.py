"""Lightning attention (MiniMax-01, 2025): linear attention with a fixed decay for each head and layer.

    S = exp(-slope) S + k v^T        o = q S        slope = 2 ** (-8 head / heads) (1 - layer / (layers - 1))

Source: MiniMax, "MiniMax-01", https://arxiv.org/abs/2501.08313.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from meshwright.models.at_layer import AtLayer
from meshwright.models.fields import check_fields
from meshwright.models.mixers.mixer import (
    CHUNK,
    ChunkProduct,
    LoopPass,
    Loops,
    State,
    StateMixer,
    StateOps,
    V,
)
from meshwright.models.param import Param

_LITTLE = 1e-5  # added to the decays' factors, so that the last layer's is not 0
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Lightning(StateMixer):
    """num_heads (g) of head_dim (s of keys and p of values)."""

    title: ClassVar[str] = "lightning attention"
    runs: ClassVar[bool] = True

    num_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        check_fields(self, "lightning")

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"g": self.num_heads, "u": 1, "s": self.head_dim, "p": self.head_dim}

    def params(self) -> dict[str, Param]:
        return {
            "state_q": Param("Dgs"),
            "state_k": Param("Dgs"),
            "state_v": Param("Dgup"),
            "state_gate": Param("Dgup"),
            "state_norm": Param("gup", "ones"),
            "state_out": Param("gupD", fan_in="gup"),
        }

    def states(self) -> dict[str, State]:
        return {"state": State("Bgusp", "f32")}

    def slope(self, number: int, num_layers: int) -> float:
        """From 1 in the first layer almost to 0 in the last."""
        return 1 - number / (num_layers - 1 + _LITTLE) + _LITTLE

    def chunk_products(self, d_model: int, chunk: float = CHUNK) -> tuple[ChunkProduct, ...]:
        """For each head: queries by keys, these scores by values, a read of the state, and its update."""
        heads, width = self.num_heads, self.head_dim
        return (
            ChunkProduct(heads, chunk, width, chunk),
            ChunkProduct(heads, chunk, chunk, width),
            ChunkProduct(heads, chunk, width, width),
            ChunkProduct(heads, width, chunk, width),
        )

    def backward_flops(self, d_model: int, chunk: float = CHUNK) -> float:
        """Two products for each; the states and q . k are computed again."""
        again = self.num_heads * (2 * chunk * self.head_dim + 2 * self.head_dim**2)
        return 2 * self.chunk_flops(d_model, chunk) + again

    def loops(self) -> Loops:
        """Counted for MiniMax-01."""
        return Loops(LoopPass(17, 1.6), LoopPass(41, 4.9))

    def step_flops(self, d_model: int) -> float:
        return 5 * self.num_heads * self.head_dim**2

    def mix(
        self, ops: StateOps[V], w: Mapping[str, V], h: V, at: AtLayer, *, norm_eps: float
    ) -> tuple[V, AtLayer]:
        q, k, v, gate = ops.einsums(
            h,
            w,
            state_q="BTD,Dgs->BTgs",
            state_k="BTD,Dgs->BTgs",
            state_v="BTD,Dgup->BTgup",
            state_gate="BTD,Dgup->BTgup",
        )
        q = ops.apply("active_q", "silu", "BTgs->BTgs", q)
        k = ops.apply("active_k", "silu", "BTgs->BTgs", k)
        v = ops.apply("active_v", "silu", "BTgup->BTgup", v)
        decay = ops.slopes("slope", v, at.kind)
        o, at = ops.recurrence("lightning", q, k, v, decay, None, at)
        o = ops.apply(
            "state_norm",
            "normed_by_sigmoid",
            "BTgup,BTgup,gup->BTgup",
            o,
            gate,
            w["state_norm"],
            eps=_NORM_EPS,
            normed="gup",
        )
        (y,) = ops.einsums(o, w, state_out="BTgup,gupD->BTD")
        return y, at
