"""The operations of inference whose results for a token do not depend on the others, bit for bit.

XLA's products add in an order that depends on their shapes, and its vector instructions may round roots and
exponentials differently from its scalar ones: the number of tokens decides which are used (float32, XLA for
CPU in jax 0.10.2). So both are computed in tiles of one number of rows. The products of kernels.py compute
each row by itself, and are left as they are. Attention over pages has `PagedCache.batch_invariant`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from meshwright.models.at_layer import AtLayer
from meshwright.nn.attention.rotary import apply_rope, apply_temperature, norm_turned
from meshwright.nn.cached_ops import InferenceOps
from meshwright.nn.each_device import each_device, partitions_of, spec_of
from meshwright.nn.norms import activate, dot, gated, mean_of_last, norm, softcap
from meshwright.nn.products.narrow import Kept, wide
from meshwright.nn.products.row_products import einsum_of_rows, in_tiles
from meshwright.nn.products.stored_products import rows_product
from meshwright.nn.stack import KindInLoop


class BatchInvariantOps(InferenceOps):
    """`InferenceOps` in tiles of rows."""

    def _by_xla(self, spec: str, x: Array, w: Array, out_sharding: PartitionSpec) -> Array:
        return einsum_of_rows(self._rows, spec, x, w, out_sharding)

    def _rows(self, x: Array, w: Array) -> Array:
        return in_tiles(lambda tile: rows_product(tile, w), x)

    def _with_heads(self, spec: str, x: Array, w: Array) -> Array:
        return _by_token(partial(jnp.einsum, spec), x, weights=(w,))

    def norm(
        self,
        name: str,
        x: Array,
        scale: Array | None,
        bias: Array | None = None,
        *,
        kind: str = "rms",
        num_letters: int = 1,
        eps: float | None = None,
    ) -> Array:
        if any(partitions_of(x)[-num_letters:]):
            return super().norm(name, x, scale, bias, kind=kind, num_letters=num_letters, eps=eps)
        mean = partial(mean_of_last, num_dims=num_letters)
        with jax.named_scope(name):
            return _by_token(
                lambda x, scale, bias: norm(x, scale, bias, kind, self.config, mean, eps),
                x,
                weights=(scale, bias),
            )

    def dot(self, name: str, x: Array | Kept, w: Array) -> Array:
        x = wide(x)
        if partitions_of(x)[-1] is not None:
            return super().dot(name, x, w)
        with jax.named_scope(name):
            return _by_token(dot, x, weights=(w,))

    def gated(self, name: str, y: Array, gate: Array) -> Array:
        with jax.named_scope(name):
            return _by_token(gated, y, gate)

    def rope(self, name: str, x: Array, at: AtLayer, *, leading: bool = False, back: bool = False) -> Array:
        config = self.config.at(at.kind.variant)
        with jax.named_scope(name):
            return _by_token(
                lambda x, positions: apply_rope(x, positions, config, at.kind, leading=leading, back=back),
                x,
                at.places.positions,
            )

    def turned_norm(self, name: str, x: Array, kind: KindInLoop) -> Array:
        with jax.named_scope(name):
            return _by_token(lambda x: norm_turned(x, self.config, kind), x)

    def temperature(self, name: str, q: Array, at: AtLayer) -> Array:
        with jax.named_scope(name):
            return _by_token(
                lambda q, positions: apply_temperature(q, positions, self.config, at.kind),
                q,
                at.places.positions,
            )

    def activation(
        self, name: str, gate: Array, up: Array | None, kind: str, slopes: tuple[Array, Array] | None = None
    ) -> Array:
        with jax.named_scope(name):
            return _by_token(
                lambda gate, up, slopes: activate(gate, up, kind, slopes), gate, up, weights=(slopes,)
            )

    def softcap(self, name: str, logits: Array, cap: float) -> Array:
        with jax.named_scope(name):
            return _by_token(lambda x: softcap(x, cap).astype(x.dtype), logits)


def _by_token(compute: Callable[..., Array], *arrays: Any, weights: Sequence[Any] = ()) -> Array:
    """`compute` of arrays by token and of whole weights, in tiles; the result is split as the first array."""

    def local(arrays: Any, weights: Mapping[str, Any]) -> Array:
        return in_tiles(lambda tile: compute(*tile, *weights), arrays)

    specs = jax.tree.map(spec_of, (arrays, tuple(weights)))
    return each_device(local, specs, spec_of(arrays[0]))(arrays, tuple(weights))
