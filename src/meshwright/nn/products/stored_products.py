"""Products with the weights of inference: with summed dimensions last, or in panels, joined or quantised."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from meshwright.layout import Layout
from meshwright.layout.contractions import input_groups
from meshwright.models.config import ModelConfig
from meshwright.native import kernels
from meshwright.nn.each_device import each_device, partitions_of, spec_of
from meshwright.nn.embedding import embed
from meshwright.nn.experts.grouped_products import read_product
from meshwright.nn.norms import along
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.ops.products import Readable
from meshwright.nn.products.execute import apply_reshard
from meshwright.nn.products.panels import Panels
from meshwright.nn.products.quantised import (
    Quantised,
    is_narrow,
    quantised_product,
    rounded_product,
    type_name,
    widened,
)
from meshwright.nn.products.row_products import einsum_of_rows
from meshwright.nn.start.device_mesh import partition_spec, platform
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import Contraction, Einsum, Reshard


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["sizes"])
@dataclass(frozen=True)
class Joined:
    """Weights of one input joined in the first one's place: `sizes` are of their first dimensions."""

    weight: Any
    sizes: tuple[int, ...]


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclass(frozen=True)
class Elsewhere:
    """Placeholder of a weight that is part of a Joined one."""


class ProductsOfStored(JaxOps):
    """Products of activations with the weights that `layered` stores.

    The native kernels (`native/kernels.py`) multiply weights in panels. with_native: other operations may use
    these kernels, too.
    """

    def __init__(self, config: ModelConfig, layout: Layout, *, with_native: bool = False) -> None:
        super().__init__(config, layout)
        self._with_native = with_native

    def _once(self, x: Array) -> Array:
        return each_device(kernels.once, spec_of(x), spec_of(x))(x) if self._with_native else x

    def activation(
        self,
        name: str,
        gate: Readable,
        up: Readable,
        kind: str,
        slopes: tuple[Array, Array] | None = None,
    ) -> Array:
        if self._with_native:
            # In bf16 XLA for CPUs rounds after every operation, which takes 2.5 times the time.
            gate, up = (None if one is None else one.astype(jnp.float32) for one in (gate, up))
        return super().activation(name, gate, up, kind, slopes).astype(self.dtype)

    def einsums(self, x: Array, weights: Mapping[str, Any], **specs: str) -> tuple[Array, ...]:
        joined = weights[next(iter(specs))]
        if not isinstance(joined, Joined):
            return super().einsums(x, weights, **specs)
        [group] = input_groups(self.layout, specs)
        name, plan = next(iter(group.plans.items()))
        y = self._einsum(name, plan, apply_reshard(group.reshard, x), joined.weight)
        return tuple(lax.split(y, joined.sizes, plan.einsum.out.index(weight_letters(plan)[0])))

    def _einsum(self, name: str, plan: Contraction, x: Array, weight: Array | Quantised | Panels) -> Array:
        einsum = plan.einsum
        spec = f"{einsum.lhs},{weight_letters(plan)}->{einsum.out}"
        with jax.named_scope(name):
            if isinstance(weight, Panels):
                w: Array | Panels | Quantised = weight
            elif self._routes:
                return read_product(plan, x, self._of_experts(plan, weight), self._routes, self._of_one)
            elif isinstance(weight, Quantised) and not weight.is_grouped:
                return self._scaled_product(plan, spec, x, weight)
            elif isinstance(weight, Quantised) and isinstance(weight.values, Panels):
                w = weight
            else:
                w = self._read_weight(plan, weight)
            rounded_to = self._rounded_to if isinstance(weight, Quantised) else None
            y = self._product(plan, spec, x, w, rounded_to).astype(self.dtype)
            return apply_reshard(plan.out_reshard, y)

    def _product(
        self,
        plan: Contraction,
        spec: str,
        x: Array,
        w: Array | Panels | Quantised,
        rounded_to: str | None = None,
    ) -> Array:
        """The product in the operands' types; x is cast to the type of weights in int8 and fp8.

        w: Quantised if the weight has groups; its values and scales are then in panels. rounded_to: the type
        to round x to, for a weight with groups; None: x is not rounded.
        """
        spec_of_product = partition_spec(plan.product)
        if isinstance(w, Quantised):
            parts = w.values.numbers, w.scales.numbers

            def grouped(rows: Array, parts: tuple[Array, Array]) -> Array:
                return kernels.grouped_int4_product(rows, *parts, rounds=rounded_to is not None)

            return einsum_of_rows(grouped, spec, x, parts, spec_of_product)
        if isinstance(w, Panels):
            is_widened = is_narrow(w.dtype) and not self._is_narrow(w)
            product = kernels.widened_product if is_widened else kernels.product
            return einsum_of_rows(product, spec, x, w.numbers, spec_of_product)
        if is_narrow(w.dtype):
            return einsum_of_rows(partial(quantised_product, self._rows), spec, x, w, spec_of_product)
        if rounded_to is not None:
            product = partial(rounded_product, self._rows, rounded_to)
            return einsum_of_rows(product, spec, x, w, spec_of_product)
        return self._by_xla(spec, x, w, spec_of_product)

    def _by_xla(self, spec: str, x: Array, w: Array, out_sharding: PartitionSpec) -> Array:
        """The einsum, summed in float32."""
        return _product(spec, x, w, out_sharding)

    def _rows(self, x: Array, w: Array) -> Array:
        """`rows_product` of the rows that a device has."""
        return rows_product(x, w)

    @property
    def _rounded_to(self) -> str | None:
        """The type of rounded activations next to weights with groups; None: they are not rounded."""
        dtype = self.layout.precision.matmul_dtype
        return None if dtype == self.layout.precision.compute_dtype else dtype

    def _is_narrow(self, values: Array | Panels) -> bool:
        """Whether activations are cast to the type of a weight's values."""
        return is_narrow(values.dtype) and type_name(values.dtype) == self.layout.precision.matmul_dtype

    def _of_experts(self, plan: Contraction, weight: Array | Quantised) -> Array | Quantised:
        """The experts' weights gathered for the products of rows, in their stored type."""
        move = in_order(plan.rhs_reshard, weight_letters(plan))
        if isinstance(weight, Quantised):
            return Quantised(apply_reshard(move, weight.values), weight.scales)
        return apply_reshard(move, weight)

    def _of_one(self, x: Array, weight: Array | Quantised) -> Array:
        """Rows x[C, I] by the weight[O, I] of one expert."""
        if not isinstance(weight, Quantised):
            return rows_product(x, weight.astype(self.dtype)).astype(self.dtype)
        if weight.is_grouped:
            to = self._rounded_to
            product = rows_product if to is None else partial(rounded_product, rows_product, to)
            return product(x, widened(weight, self.dtype)).astype(self.dtype)
        if self._is_narrow(weight.values):
            y = quantised_product(rows_product, x, weight.values)
        else:
            y = rows_product(x, weight.values.astype(self.dtype))
        return (y * weight.scales[None]).astype(self.dtype)

    def _scaled_product(self, plan: Contraction, spec: str, x: Array, weight: Quantised) -> Array:
        """The product with a weight that has a scale for each output; the scales multiply the results."""
        einsum, values = plan.einsum, weight.values
        if not isinstance(values, Panels):
            values = apply_reshard(in_order(plan.rhs_reshard, weight_letters(plan)), values)
            values = values if self._is_narrow(values) else values.astype(self.dtype)
        y = self._product(plan, spec, x, values)
        y = apply_reshard(plan.out_reshard, y.astype(self.dtype)).astype(jnp.float32)
        kept = [letter for letter in weight_letters(plan) if letter in einsum.out]
        dims = tuple(einsum.out.index(letter) for letter in kept)
        return (y * along(y, self._split_as(y, dims, weight.scales), dims)).astype(self.dtype)

    def _read_weight(self, plan: Contraction, weight: Array | Quantised) -> Array:
        """The weight as its product reads it: gathered if the plan says so."""
        return apply_reshard(in_order(plan.rhs_reshard, weight_letters(plan)), widened(weight, self.dtype))

    def embed(self, name: str, tokens: Array, table: Array | Quantised | Panels) -> Array:
        if not isinstance(table, Quantised | Panels):
            return super().embed(name, tokens, table)
        with jax.named_scope(name):
            if isinstance(table, Panels):
                return self._rows_of(table, tokens).astype(self.dtype)
            rows = self._rows_of(table.values, tokens).astype(jnp.float32)
            scales = embed(tokens, table.scales[:, None], self.layout, is_column=True)
            return (rows * scales).astype(self.dtype)

    def _rows_of(self, table: Array | Panels, tokens: Array) -> Array:
        if isinstance(table, Panels):
            return embed(tokens, table.numbers, self.layout, rows_of=kernels.rows_of_panels)
        return embed(tokens, table, self.layout)


def _product(spec: str, x: Array, w: Array, out_sharding: PartitionSpec) -> Array:
    """The einsum by XLA, summed in float32, in the form that is fastest on the platform."""
    if x.shape[:2] == (1, 1) and spec.startswith("B") and _is_paired(x):
        return _product(spec, jnp.concatenate([x, x]), w, out_sharding)[:1]
    if spec.startswith("B") and w.ndim > 2 and not Einsum.parse(spec).batched:
        return _of_flat_weight(spec, x, w, out_sharding)
    return jnp.einsum(spec, x, w, out_sharding=out_sharding, preferred_element_type=jnp.float32)


def rows_product(x: Array, w: Array) -> Array:
    """y[C, O] = x[C, I] by w[O, I], summed in float32, of int8 in int32."""
    if len(x) == 1 and _is_paired(x):
        return rows_product(jnp.concatenate([x, x]), w)[:1]
    sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return jnp.einsum("CI,OI->CO", x, w, preferred_element_type=sums)


def _is_paired(x: Array) -> bool:
    """Whether a single row is computed as two."""
    return x.dtype in (jnp.bfloat16, jnp.int8) and platform().pairs_rows


def _of_flat_weight(spec: str, x: Array, w: Array, out_sharding: PartitionSpec) -> Array:
    """The einsum with w[N, H, D] as [N·H, D]: XLA for CPU would copy it transposed, every step.

    On a 134M LLaMA a step with one row took 245 ms, mostly for such copies (jax 0.10.2, two busy cores).
    """
    _, rhs, out = spec.replace("->", ",").split(",")
    kept = [letter for letter in rhs if letter in out]
    first, last = _joint_axes(w, len(kept))
    flat = jnp.reshape(w, (prod(w.shape[: len(kept)]), -1), out_sharding=_spec_like(w, first, last))
    *rows, inner = partitions_of(x)[:3]
    x = jnp.reshape(x, (*x.shape[:2], -1), out_sharding=_spec_like(x, *rows, inner))
    through = PartitionSpec(*out_sharding.partitions[:2], first, unreduced=out_sharding.unreduced)
    y = jnp.einsum("BTI,OI->BTO", x, flat, out_sharding=through, preferred_element_type=jnp.float32)
    shape = (*y.shape[:2], *w.shape[: len(kept)])
    return y if len(kept) == 1 else jnp.reshape(y, shape, out_sharding=out_sharding)


def _joint_axes(x: Array, num_first: int) -> tuple[Any, Any]:
    """The axes that split the first and the last dimensions of x, as two joint dimensions."""
    first, last = partitions_of(x)[:num_first], partitions_of(x)[num_first:]
    assert not any((*first[1:], *last[1:])), "only the outer dimension is split"
    return first[0], last[0]


def _spec_like(x: Array, *parts: object) -> PartitionSpec:
    return PartitionSpec(*parts, reduced=jax.typeof(x).sharding.spec.reduced)


def weight_letters(plan: Contraction) -> str:
    """The letters of a weight's stored array, with summed letters last."""
    einsum = plan.einsum
    return "".join(sorted(einsum.rhs, key=lambda letter: letter not in einsum.out))


def in_order(reshard: Reshard, letters: str) -> Reshard:
    """The same reshard for an array with its dimensions in the order of `letters`."""
    given, used = transposed(reshard.given, letters), transposed(reshard.used, letters)
    return Reshard(given, used, transposed(reshard.yielded, letters))


def transposed(array: ShardedArray, letters: str) -> ShardedArray:
    """The same array with its dimensions in the order of `letters`."""
    axes = tuple(array.axes_of(letter) for letter in letters)
    return ShardedArray(array.name, tuple(letters), axes, array.unreduced)
