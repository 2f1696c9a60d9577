"""Attention with compressed keys, recorded as nodes."""

from dataclasses import replace

from meshwright.cost.graph import Node, Value
from meshwright.cost.ops.attention import AttentionOps
from meshwright.layout.moves.attention import gathered_series
from meshwright.models.at_layer import AtLayer
from meshwright.models.ops import Entries
from meshwright.notation.operation import placed_operation


class CompressionOps(AttentionOps):
    """Attention with compressed keys of `models/transformer.py`."""

    def compressed(
        self, name: str, values: Value, gates: Value, bias: Value, at: AtLayer
    ) -> tuple[Entries[Value], AtLayer]:
        """Gather values and gates over positions, then sum them to entries."""
        letters = "".join(values.array.dims)
        values, gates = (
            self.reshard(
                f"{name}_{part}",
                "move",
                x,
                gathered_series(self.layout, f"{name}_{part}", letters),
                x.dtype,
                critical=True,
                what="keys and values",
            )
            for part, x in (("kv", values), ("gate", gates))
        )
        array = values.array.replace(name=name)
        operation = placed_operation((array, bias.array), array, wanted=True)
        self.sum_gradient(bias.name, bias, operation.reshards[1].yielded)
        self.sizes["q"] = self._positions_summed() / self.sizes["w"]
        entries = self.activation_value(name, f"Bq{letters[-1]}")
        made = self.elementwise(name, (values, gates), entries, (values, gates))
        return Entries(made, at.places), at

    def _positions_summed(self) -> float:
        """Positions of a sequence that one pass sums to entries."""
        return self.sizes["S"]

    def grouped(self, name: str, a: Value) -> Value:
        """a[B, T, N, H] with its heads in groups: the same array as [B, T, g, u, H]."""
        out = replace(self.value(self.layout.activation(name, "BTguH"), a.dtype), is_copy=False)
        return self.add(Node(name, "move", (a,), (out,)))
