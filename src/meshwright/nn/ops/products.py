"""Products with weights, their biases and look-ups of tables in JAX.

The collectives of an einsum are exactly those of its `Contraction` (nn/products/execute.py). Three
projections of one input share its move and, backward, the one reduction of its cotangent. A gathered weight's
gradient is reduce-scattered.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.contractions import input_groups
from meshwright.layout.moves.experts import (
    expert_rows,
    row_routing,
)
from meshwright.layout.runnable import check_model_runs, check_runs
from meshwright.models.at_layer import Places
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import ADAPTER_B, is_latent
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.each_device import partitions_of
from meshwright.nn.embedding import embed, embed_positions
from meshwright.nn.experts.dropless import (
    Routes,
    rows_at_columns,
)
from meshwright.nn.experts.grouped_products import biased_rows, grouped_product
from meshwright.nn.frozen import Frozen, widened
from meshwright.nn.gradients import Scattered, read, sent_types
from meshwright.nn.norms import along
from meshwright.nn.products.contract import local_product
from meshwright.nn.products.execute import apply_reshard, named_once
from meshwright.nn.products.narrow import Kept, kept, narrow_multiply, narrow_product, wide
from meshwright.nn.remat import MATMUL, OF_LATENT, OPERATION, SECOND
from meshwright.nn.start.device_mesh import partition_spec, platform
from meshwright.notation.einsum import Contraction, Reshard
from meshwright.notation.operation import bias_reshard

# An Array, or in training a Kept: operations for inference take only arrays.
Readable = Any


class ProductOps:
    """Embeddings, products and biases of `models/transformer.py`. Call under `jax.set_mesh`."""

    def __init__(self, config: ModelConfig, layout: Layout) -> None:
        check_model_runs(config, layout)
        check_runs(layout, layout.phase)
        self.config, self.layout = config, layout
        self.dtype = jax_dtype(layout.precision.compute_dtype)
        self._sent_in = sent_types(layout, self.dtype)
        narrow = layout.precision.matmul_dtype if layout.phase == "train" else None
        self._narrow = None if narrow == layout.precision.compute_dtype else narrow
        self._saved_in = layout.precision.saved_dtype if layout.phase == "train" else None
        self._scales = layout.precision.matmul_scales or "rows"
        self._num_products = 0  # of the layer that is being traced
        self._kinds: dict[str, str] = {}  # of its products and exchanges so far, as policies know them
        self._routes: Routes | None = None  # of the experts that are being traced, without a capacity
        self._token: Array | None = None
        self.parted: set[str] = set()

    def _once(self, x: Array) -> Array:
        """x. Operations with native kernels override it, so that x is computed once for all its readers."""
        return x

    def reads(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The weights as arrays; each layer reads its own in this way."""
        return {name: self._read(name, weight) for name, weight in weights.items()}

    def _read(self, name: str, weight: Any) -> Any:
        if isinstance(weight, Frozen):
            with jax.named_scope(name):
                return widened(weight, self.dtype)
        return read(self.layout, self.dtype, name, weight) if isinstance(weight, Scattered) else weight

    def embed(self, name: str, tokens: Array, table: Array) -> Array:
        with jax.named_scope(name):
            return embed(tokens, self._table(table), self.layout, self._sent_in)

    def add_positions(self, name: str, x: Array, places: Places, table: Array) -> Array:
        with jax.named_scope(name):
            numbers = places.positions + self.config.position_offset
            rows = embed_positions(numbers, self._table(table), self.layout, self._sent_in)
            return checkpoint_name(x + rows, OPERATION)

    def _table(self, table: Array) -> Array:
        """A table for look-ups: in the type that it travels in, unless its gradient has another."""
        return table if self._sent_in else table.astype(self.dtype)

    def kept(self, name: str, x: Array) -> Readable:
        """x for products and gates, in the type of `saved_dtype`, under its name in remat policies."""
        if self._saved_in is None:
            return x
        is_sum = name + ADAPTER_B in self._kinds  # of a product and its adapter's
        with jax.named_scope(name):
            known_as = OPERATION if is_sum else self._kinds.get(name, OPERATION)
            return kept(x, self._saved_in, self._scales, known_as)

    def einsums(self, x: Readable, weights: Mapping[str, Array], **specs: str) -> tuple[Array, ...]:
        """Several contractions of one input with the weights so named; the input is moved once."""
        made: dict[str, Array] = {}
        named: dict[str, Array] = {}
        for group in input_groups(self.layout, specs):
            move = group.reshard
            with jax.named_scope(group.name):
                if self._routes:
                    moved = self._rows_at_columns(wide(x), move)
                else:
                    if group.name not in named:
                        named[group.name] = named_once(wide(x)) if move.forward else wide(x)
                    moved = self._moved(x, named[group.name], move)
            for name, plan in group.plans.items():
                made[name] = self._einsum(name, plan, moved, weights[name])
        return tuple(made[name] for name in specs)

    def _moved(self, x: Array | Kept, sent: Array, move: Reshard) -> Array | Kept:
        """An input where its products are; if it is kept narrow, they save the moved array narrow, too.

        sent: x as it is sent, under the name of its reader.
        """
        moved = apply_reshard(move, sent, is_named=True)
        if not isinstance(x, Kept) or self._saved_in is None:
            return moved
        return x if moved is x.wide else kept(moved, self._saved_in, self._scales)

    def _einsum(self, name: str, plan: Contraction, x: Readable, weight: Array) -> Array:
        with jax.named_scope(name):
            w, kind = self._fetched(plan, weight), self._kind_of_product(plan)
            self._kinds[name] = kind
            if self._routes:
                multiply = narrow_multiply(self.dtype, self._narrow, self._scales) if self._narrow else None
                return checkpoint_name(grouped_product(plan, wide(x), w, self._routes, multiply), kind)
            if self._narrow and not plan.einsum.batched:
                y = narrow_product(plan, self.dtype, self._narrow, x, w, self._scales)
            else:
                # The logits are freed before the head's gradient is all-reduced into another array.
                sums_last = platform().whole_sums and plan.einsum.out.endswith("V")
                y = local_product(plan, self.dtype, wide(x), w, self._token, sums_last=sums_last)
                self.parted |= {name} if self._token is not None else set()
            return checkpoint_name(apply_reshard(plan.out_reshard, y), kind)

    def _rows_at_columns(self, rows: Array, move: Reshard) -> Array:
        """Rows of experts, exchanged from the devices where they arrived to devices with columns."""
        assert self._routes and self.config.moe, "only a mixture of experts has rows of experts"
        if not move.forward:
            return rows
        return rows_at_columns(rows, self._routes, self.layout, self.config.moe)

    def _fetched(self, plan: Contraction, weight: Array) -> Array:
        """A weight as its product reads it, with a gradient summed in the layout's type for gradients."""
        if self._sent_in is None:
            return apply_reshard(plan.rhs_reshard, weight.astype(self.dtype))
        return apply_reshard(plan.rhs_reshard, weight, self._sent_in)

    def _kind_of_product(self, plan: Contraction) -> str:
        """MATMUL, or SECOND for every second product of a layer; sums over devices are always MATMUL."""
        number, self._num_products = self._num_products, self._num_products + 1
        is_sum = plan.out_reshard.forward or plan.out_reshard.backward
        kind = MATMUL if number % 2 == 0 or is_sum else SECOND
        return OF_LATENT[kind] if is_latent(plan.einsum.lhs) else kind

    def bias(self, name: str, y: Array, b: Array) -> Array:
        """y plus b; b has the last dimensions of y, or of y[E, C, M] the first and the last."""
        is_of_experts = (y.ndim, b.ndim) == (3, 2)
        dims = (y.ndim - 3, y.ndim - 1) if is_of_experts else tuple(range(y.ndim - b.ndim, y.ndim))
        with jax.named_scope(name):
            if self._routes:
                return checkpoint_name(self._biased_rows(name, y, b.astype(self.dtype)), OPERATION)
            split = self._split_as(y, dims, b.astype(self.dtype))
            return checkpoint_name(y + along(y, split, dims), OPERATION)

    def _biased_rows(self, name: str, y: Array, b: Array) -> Array:
        """Rows plus b[E, M] or, for sums over the columns of an expert, b[E, D]."""
        assert self._routes, "rows have routes"
        is_sum = name.startswith("expert_out")
        rows = expert_rows(self.layout, name, "ECD" if is_sum else "ECM")
        move = bias_reshard(rows, self.layout.weight(name, "ED" if is_sum else "EM"))
        if move.forward:
            b = apply_reshard(move, b)
        else:
            spec = partition_spec(rows)
            b = reshard(b, PartitionSpec(spec[0], spec[2], reduced=jax.typeof(b).sharding.spec.reduced))
        return biased_rows(y, b, self._routes, row_routing(self.layout).columns if is_sum else ())

    def _split_as(self, x: Array, dims: Sequence[int], vector: Array) -> Array:
        """A small weight split as the dimensions `dims` of x."""
        split = [partitions_of(x)[dim] for dim in dims]
        return reshard(vector, PartitionSpec(*split, reduced=jax.typeof(vector).sharding.spec.reduced))
