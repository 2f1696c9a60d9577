"""A residual of several streams, recorded as nodes."""

from meshwright.cost.graph import Value
from meshwright.cost.ops.products import ProductOps
from meshwright.models.streams import HyperConnections
from meshwright.notation.array import ShardedArray
from meshwright.notation.operation import placed_operation


class StreamOps(ProductOps):
    """The operations of `models/streams.py`."""

    def spread(self, name: str, x: Value, streams: HyperConnections) -> Value:
        return self.elementwise(name, (x,), self.activation_value(name, "BToD"), ())

    def stream_gates(
        self, name: str, m: Value, bias: Value, scale: Value, streams: HyperConnections
    ) -> Value:
        """Elementwise operations on a few numbers of each token, in float32."""
        for stored in (bias, scale):
            factors = ShardedArray(stored.name, (*m.array.dims[:2], stored.array.dims[0]), m.array.axes)
            operation = placed_operation((factors, stored.array), factors, wanted=True)
            self.sum_gradient(stored.name, stored, operation.reshards[1].yielded)
        return self.elementwise(name, (m,), self.value(m.array, "f32"), (m,))

    def collapsed(self, name: str, x: Value, gates: Value) -> Value:
        return self.elementwise(name, (x, gates), self.activation_value(name, "BTD"), (x, gates))

    def mixed(self, name: str, x: Value, y: Value, gates: Value) -> Value:
        return self.elementwise(name, (x, y, gates), self.value(x.array, x.dtype), (x, y, gates))
