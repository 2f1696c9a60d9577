"""The gated delta rule (Yang et al., 2024), and Kimi's form of it with a decay for each element of a key.

A state S[s, p] of each head forgets a share at each position, and one of its associations is replaced:

    S = exp(decay) S + k (beta (v - k exp(decay) S))^T        o = q S

Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", https://arxiv.org/abs/2412.06464; Kimi Team, "Kimi
Linear", https://arxiv.org/abs/2510.26692.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from meshwright.errors import ModelError
from meshwright.models.at_layer import AtLayer
from meshwright.models.fields import check_fields
from meshwright.models.mixers.mixer import (
    CHUNK,
    AddedFlops,
    ChunkProduct,
    LoopPass,
    Loops,
    PieceFlops,
    State,
    StateMixer,
    StateOps,
    V,
)
from meshwright.models.param import Param


def inverse_flops(size: int) -> int:
    """FLOPs of inverting a unit triangular [C, C] by halves.

    Two products of [C/2, C/2] give the block below the diagonal; each half is inverted likewise.

    >>> inverse_flops(2), inverse_flops(4)
    (0, 32)
    """
    half = -(-size // 2)
    return 4 * half**3 + 2 * inverse_flops(half) if size > 2 else 0


@dataclass(frozen=True)
class GatedDelta(StateMixer):
    """num_key_heads (g) of key_dim (s), num_value_heads (g u) of value_dim (p), conv_width (c) taps.

    rank (r): of the decays, one for each element of a key, and of the gates (Kimi Linear); None: one decay
    for each value head, and gates of full rank. wide_gate: gates of full rank in any case (Kimi K3).
    wide_decay: a decay for each element of a key, of full rank (Bailing).
    """

    title: ClassVar[str] = "gated delta rule"
    runs: ClassVar[bool] = True

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    rank: int | None = None
    wide_gate: bool = False
    wide_decay: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "delta")
        if self.num_value_heads % self.num_key_heads:
            raise ModelError(
                f"delta: {self.num_value_heads} value heads do not divide over {self.num_key_heads} key heads"
            )

    def sizes(self, d_model: int) -> dict[str, int]:
        sizes = {
            "g": self.num_key_heads,
            "u": self.num_value_heads // self.num_key_heads,
            "s": self.key_dim,
            "p": self.value_dim,
            "c": self.conv_width,
            "t": self.conv_width - 1,
        }
        return sizes | ({"r": self.rank} if self.rank else {})

    @property
    def _decays(self) -> str:
        """The letters of decays: one for each value head, or for each element of its keys."""
        return "gus" if self.rank or self.wide_decay else "gu"

    def params(self) -> dict[str, Param]:
        params = {"state_q": Param("Dgs"), "state_k": Param("Dgs"), "state_v": Param("Dgup")}
        if self.rank and not self.wide_decay:
            params |= {"state_decay_down": Param("Dr"), "state_decay_up": Param("rgus", fan_in="r")}
        else:
            params["state_decay"] = Param(f"D{self._decays}")
        if self.rank and not self.wide_gate:
            params |= {"state_gate_down": Param("Dr"), "state_gate_up": Param("rgup", fan_in="r")}
        else:
            params["state_gate"] = Param("Dgup")
        return params | {
            "state_beta": Param("Dgu"),
            "conv_q": Param("gsc", "taps", "c"),
            "conv_k": Param("gsc", "taps", "c"),
            "conv_v": Param("gupc", "taps", "c"),
            "decay_log": Param("gu", "decay"),
            "decay_bias": Param(self._decays, "ones"),
            "state_norm": Param("p", "ones"),
            "state_out": Param("gupD", fan_in="gup"),
        }

    def states(self) -> dict[str, State]:
        return {
            "state": State("Bgusp", "f32"),
            "conv_q": State("Bgst"),
            "conv_k": State("Bgst"),
            "conv_v": State("Bgupt"),
        }

    def chunk_products(self, d_model: int, chunk: float = CHUNK) -> tuple[ChunkProduct, ...]:
        """The products of a chunk, in order.

        For each key head, keys by keys and by queries. For each value head, two reads of the state, its
        update, and the values of the chunk. The triangular system is solved without products.
        """
        keys, values, s, p = self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim
        return (
            *[ChunkProduct(keys, chunk, s, chunk)] * 2,
            *[ChunkProduct(values, chunk, s, p)] * 2,
            ChunkProduct(values, s, chunk, p),
            ChunkProduct(values, chunk, chunk, p),
        )

    def backward_flops(self, d_model: int, chunk: float = CHUNK) -> float:
        """Two products for each, one for the system, and the repeated products of states and systems."""
        s, p = self.key_dim, self.value_dim
        again = self.num_key_heads * 6 * chunk * s + self.num_value_heads * (6 * s * p + 2 * chunk * p)
        return 2 * self.chunk_flops(d_model, chunk) + again

    def piece_flops(self, d_model: int, chunk: float = CHUNK) -> PieceFlops:
        """The scan sums the piece's contribution to the state, and the array [s, s] that changes the state.

        2 C s   of each key head: keys with keys
        4 s w   of each value head, with w = p + s columns: the state read and written
        2 s^2 p of each value head and piece: the array by the state
        """
        s, columns = self.key_dim, self.value_dim + self.key_dim
        forward = self.num_key_heads * 2 * chunk * s + self.num_value_heads * 4 * s * columns
        again = self.num_key_heads * 4 * chunk * s + self.num_value_heads * (6 * s + 2 * chunk) * columns
        return PieceFlops(forward, 2 * forward + again, self.num_value_heads * 2 * s * s * self.value_dim)

    def solve_flops(self, columns: int, chunk: float = CHUNK) -> AddedFlops:
        """The inverse of each value head's system, and its product with the values.

        The backward pass solves again for the states, then for each chunk, and multiplies by the transposed
        inverse; `backward_flops` has the product for the system's gradient.
        """
        inverse, product = inverse_flops(ceil(chunk)) / chunk, 2 * chunk * columns
        solved = self.num_value_heads * (inverse + product)
        return AddedFlops(solved, 2 * solved + self.num_value_heads * product)

    def loops(self) -> Loops:
        """Counted for Qwen3.5 and, with a decay for each element of a key, for Kimi Linear."""
        if self.rank or self.wide_decay:
            return Loops(LoopPass(27, 3.2), LoopPass(89, 15.5))
        return Loops(LoopPass(20, 1.65), LoopPass(60, 6.1))

    def step_flops(self, d_model: int) -> float:
        """7 s p for each value head: the state is decayed, read for k and q, and written."""
        return 7 * self.num_value_heads * self.key_dim * self.value_dim

    def mix(
        self, ops: StateOps[V], w: Mapping[str, V], h: V, at: AtLayer, *, norm_eps: float
    ) -> tuple[V, AtLayer]:
        specs = {"state_q": "BTD,Dgs->BTgs", "state_k": "BTD,Dgs->BTgs", "state_v": "BTD,Dgup->BTgup"}
        specs |= {"state_beta": "BTD,Dgu->BTgu"}
        per, narrow_decay = self._decays, self.rank and not self.wide_decay
        specs |= (
            {"state_decay_down": "BTD,Dr->BTr"} if narrow_decay else {"state_decay": f"BTD,D{per}->BT{per}"}
        )
        narrow_gate = self.rank and not self.wide_gate
        specs |= {"state_gate_down": "BTD,Dr->BTr"} if narrow_gate else {"state_gate": "BTD,Dgup->BTgup"}
        q, k, v, beta, decay, gate = ops.einsums(h, w, **specs)
        if narrow_decay:
            (decay,) = ops.einsums(decay, w, state_decay_up="BTr,rgus->BTgus")
        if narrow_gate:
            (gate,) = ops.einsums(gate, w, state_gate_up="BTr,rgup->BTgup")

        def convolved(name: str, x: V, at: AtLayer) -> tuple[V, AtLayer]:
            return ops.convolution(name, x, w[name], None, at, memory=name)

        q, at = convolved("conv_q", q, at)
        k, at = convolved("conv_k", k, at)
        v, at = convolved("conv_v", v, at)
        q = ops.apply("unit_q", "unit", "BTgs->BTgs", q, scale=self.key_dim**-0.5)
        k = ops.apply("unit_k", "unit", "BTgs->BTgs", k, scale=1.0)
        decay = ops.apply(
            "decay", "decay", f"BT{per},gu,{per}->BT{per}", decay, w["decay_log"], w["decay_bias"]
        )
        beta = ops.apply("beta", "sigmoid", "BTgu->BTgu", beta)
        o, at = ops.recurrence("delta_rule", q, k, v, decay, beta, at)
        function = "normed_by_sigmoid" if self.rank else "normed_by_silu"
        spec = "BTgup,BTgup,p->BTgup"
        o = ops.apply("state_norm", function, spec, o, gate, w["state_norm"], normed="p", eps=norm_eps)
        (y,) = ops.einsums(o, w, state_out="BTgup,gupD->BTD")
        return y, at
