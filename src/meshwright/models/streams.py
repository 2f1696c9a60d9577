"""The record of a residual of several streams, mixed before and after each part of a layer.

    gates[B, T, k] = f(norm(x) . w)        x[B, T, o, D], normed over all streams together; k = o (o + 2)
    y              = sum over o of before[B, T, o] x[B, T, o, D]                 the input of a part
    x[o]           = after[B, T, o] part(y) + sum over p of mix[B, T, p, o] x[p]

The k gates are before[o], after[o] and mix[p, o]. After the last layer the streams are summed with n = o
other gates. Letters: o streams, k gates of a part and v factors of them, n gates after the last layer and z
factors of them.

Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", https://arxiv.org/abs/2512.24880, as in
DeepSeek-V4.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from meshwright.models.at_layer import CommonOps, V
from meshwright.models.fields import check_fields
from meshwright.models.param import Param


class StreamOps(CommonOps[V], Protocol[V]):
    """The operations of a residual of several streams.

    spread: x[B, T, D] in each of the streams, [B, T, o, D]. stream_gates: [B, T, k] of a product m[B, T, k],
    bias[k], and scale[v] with a factor each for `before`, `after` and `mix`; or [B, T, n] with one factor.
    collapsed: the sum [B, T, D] of the streams times `before`. mixed: the streams after a part with result
    y[B, T, D].
    """

    def spread(self, name: str, x: V, streams: "HyperConnections") -> V: ...
    def stream_gates(self, name: str, m: V, bias: V, scale: V, streams: "HyperConnections") -> V: ...
    def collapsed(self, name: str, x: V, gates: V) -> V: ...
    def mixed(self, name: str, x: V, y: V, gates: V) -> V: ...


@dataclass(frozen=True)
class HyperConnections:
    """Hyper-connections: `num_streams` (o) streams, and the constants of their gates.

    iterations: the number of iterations of the Sinkhorn-Knopp algorithm, which makes the rows and columns of
    the mixing matrix sum to 1. eps: added to gates, and to sums before a division.
    """

    num_streams: int = 4
    iterations: int = 20
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_fields(self, "streams")

    @property
    def num_gates(self) -> int:
        """k: a gate before and after the part for each stream, and the mixing matrix."""
        return self.num_streams * (self.num_streams + 2)

    def sizes(self) -> dict[str, int]:
        """The size of each letter of its weights."""
        return {"o": self.num_streams, "k": self.num_gates, "n": self.num_streams, "v": 3, "z": 1}

    def params(self, part: str) -> dict[str, Param]:
        """The weights before and after one part of a layer, attention or the feed-forward."""
        return {
            f"{part}_streams": Param("oDk", fan_in="oD"),
            f"{part}_streams_bias": Param("k", "zeros"),
            f"{part}_streams_scale": Param("v", "ones"),
        }

    def head_params(self) -> dict[str, Param]:
        """The weights that sum the streams after the last layer."""
        return {
            "streams_head": Param("oDn", fan_in="oD"),
            "streams_head_bias": Param("n", "zeros"),
            "streams_head_scale": Param("z", "ones"),
        }

    def enter(self, ops: StreamOps[V], w: Mapping[str, V], part: str, x: V) -> tuple[V, V]:
        """The input y[B, T, D] of a part, and the gates for `mixed`. x[B, T, o, D]: the streams."""
        gates = self._gates(ops, w, f"{part}_streams", x, "k")
        return ops.collapsed(f"{part}_collapsed", x, gates), gates

    def joined(self, ops: StreamOps[V], w: Mapping[str, V], x: V) -> V:
        """x[B, T, D] of the streams after the last layer."""
        return ops.collapsed("streams_joined", x, self._gates(ops, w, "streams_head", x, "n"))

    def _gates(self, ops: StreamOps[V], w: Mapping[str, V], name: str, x: V, letter: str) -> V:
        normed = ops.norm(f"{name}_norm", x, None, num_letters=2)
        specs: dict[str, Any] = {name: f"BToD,oD{letter}->BT{letter}"}
        (m,) = ops.einsums(normed, w, **specs)
        return ops.stream_gates(f"{name}_gates", m, w[f"{name}_bias"], w[f"{name}_scale"], self)
