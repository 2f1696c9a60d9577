"""A windowed (collective) matmul: one transfer of a contraction runs in steps under the product.

The n devices along the transfer's axes form a ring. A gathered operand goes round it one block a step; each
block is multiplied while the next one arrives. A scattered product goes round as a sum, and every device
adds its part to it. Either sends n - 1 times. The backward pass transposes the transfers, which run in steps
too:

    a gathered operand    goes round again for the other's gradient; its own goes round as a sum
    a scattered product   its cotangent goes round once, for both gradients

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition", 2023.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import reshard
from jax.typing import DTypeLike

from meshwright.nn.products.contract import local_einsum
from meshwright.nn.products.execute import contract, run_steps, run_to
from meshwright.nn.start.device_mesh import notation_mesh, partition_spec
from meshwright.notation.array import Axes
from meshwright.notation.collective import Collective
from meshwright.notation.einsum import Contraction, Einsum, EinsumSide, cotangent

OperandSide = Literal["lhs", "rhs"]
_Pair = tuple[Array, Array]


def windowed_contract(
    plan: Contraction, window: EinsumSide, dtype: DTypeLike, lhs: Array, rhs: Array
) -> Array:
    """`plan.out`, with a windowed gather of an operand or scatter of the product.

    The last gather of an operand, or the first scatter of the product, runs in steps. Call under
    `jax.set_mesh`. Rings are unrolled, so that XLA overlaps independent steps. A gathered operand is never
    whole on a device, forward or backward. A ring of one device is an ordinary contraction.
    """
    if notation_mesh(jax.sharding.get_abstract_mesh()).size(windowed_step(plan, window).axes) == 1:
        return contract(plan, dtype, lhs, rhs)

    @jax.custom_vjp
    def contracted(lhs: Array, rhs: Array) -> Array:
        return forward(lhs, rhs)[0]

    def forward(lhs: Array, rhs: Array) -> tuple[Array, _Pair]:
        steps = {"lhs": plan.lhs_steps, "rhs": plan.rhs_steps}
        if window != "out":
            steps[window] = steps[window][:-1]
        pair = run_steps(lhs, steps["lhs"]), run_steps(rhs, steps["rhs"])
        step = windowed_step(plan, window)
        if window == "out":
            return _finished(plan, dtype, pair, ()), pair
        travels, stays = pair if window == "lhs" else pair[::-1]
        (product,) = _gathered(step, dtype, travels, [_Use(plan, window, stays)])
        return run_steps(product, plan.out_steps), pair

    def backward(saved: _Pair, d_out: Array) -> _Pair:
        d_out = reshard(d_out, partition_spec(cotangent(plan.out)))
        if window == "out":
            return _gradients_of_scattered(plan, dtype, saved, d_out)
        return _gradients_of_gathered(plan, window, dtype, saved, d_out)

    contracted.defvjp(forward, backward)
    return contracted(lhs, rhs)


def windowed_step(plan: Contraction, window: EinsumSide) -> Collective:
    """The transfer that runs in steps."""
    steps = {"lhs": plan.lhs_steps[-1:], "rhs": plan.rhs_steps[-1:], "out": plan.out_steps[:1]}[window]
    is_possible = steps and steps[0].op == ("reduce_scatter" if window == "out" else "all_gather")
    assert is_possible, f"no transfer of {window} runs in steps"
    return steps[0]


def _gradients_of_gathered(
    plan: Contraction, window: OperandSide, dtype: DTypeLike, saved: _Pair, d_out: Array
) -> _Pair:
    """Gradients if `window` is an operand, saved as it is before its gather."""
    d_product, step = run_steps(d_out, plan.out_reshard.backward), windowed_step(plan, window)
    if window == "lhs":
        d_lhs = _finished(plan.lhs_gradient, dtype, (d_product, saved[1]), plan.lhs.unreduced)
        (d_rhs,) = _gathered(step, dtype, saved[0], [_Use(plan.rhs_gradient, "lhs", d_product)])
        return d_lhs, run_to(d_rhs, plan.rhs_gradient.out_steps, plan.rhs_gradient.out, plan.rhs.unreduced)
    d_rhs = _finished(plan.rhs_gradient, dtype, (saved[0], d_product), plan.rhs.unreduced)
    (d_lhs,) = _gathered(step, dtype, saved[1], [_Use(plan.lhs_gradient, "rhs", d_product)])
    return run_to(d_lhs, plan.lhs_gradient.out_steps, plan.lhs_gradient.out, plan.lhs.unreduced), d_rhs


def _gradients_of_scattered(plan: Contraction, dtype: DTypeLike, saved: _Pair, d_out: Array) -> _Pair:
    """Gradients if the product is scattered in steps. saved: operands after their gathers."""
    steps, (lhs, rhs) = plan.out_reshard.backward, saved
    if steps and steps[-1].op == "all_gather":
        uses = [_Use(plan.lhs_gradient, "lhs", rhs), _Use(plan.rhs_gradient, "rhs", lhs)]
        d_lhs, d_rhs = _gathered(steps[-1], dtype, run_steps(d_out, steps[:-1]), uses)
    else:
        d_product = run_steps(d_out, steps)
        d_lhs = local_einsum(plan.lhs_gradient, d_product, rhs, dtype)
        d_rhs = local_einsum(plan.rhs_gradient, lhs, d_product, dtype)
    return (
        run_to(d_lhs, plan.lhs_gradient.out_steps, plan.lhs_gradient.out, plan.lhs.unreduced),
        run_to(d_rhs, plan.rhs_gradient.out_steps, plan.rhs_gradient.out, plan.rhs.unreduced),
    )


class _Use(NamedTuple):
    """A contraction with a travelling block: its operand that travels, and the array that stays."""

    plan: Contraction
    travels: OperandSide
    stays: Array


def _gathered(step: Collective, dtype: DTypeLike, travels: Array, uses: Sequence[_Use]) -> list[Array]:
    """The product of each use, while `travels` goes once round the ring."""

    def local(block: Array, *stays: Array) -> list[Array]:
        return _Ring(step, dtype).gathered(
            block, [use._replace(stays=x) for use, x in zip(uses, stays, strict=True)]
        )

    staying = [use.plan.rhs_computed if use.travels == "lhs" else use.plan.lhs_computed for use in uses]
    in_specs = tuple(partition_spec(array) for array in (step.operand, *staying))
    out_specs = [partition_spec(use.plan.product) for use in uses]
    ring = jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return ring(travels, *[use.stays for use in uses])


def _finished(plan: Contraction, dtype: DTypeLike, computed: _Pair, reduced: Axes) -> Array:
    """`plan.out` of gathered operands; a scatter of the product runs in steps."""
    steps = plan.out_steps
    if not steps or steps[0].op != "reduce_scatter":
        return run_to(local_einsum(plan, *computed, dtype), steps, plan.out, reduced)

    def local(lhs: Array, rhs: Array) -> Array:
        return _Ring(steps[0], dtype).scattered(plan.einsum, lhs, rhs)

    in_specs = partition_spec(plan.lhs_computed), partition_spec(plan.rhs_computed)
    out_specs = partition_spec(steps[0].result)
    ring = jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return run_to(ring(*computed), steps[1:], plan.out, reduced)


class _Ring:
    """The devices along a step's axes, each with a block of the gathered or scattered letters.

    Used inside `shard_map`.
    """

    def __init__(self, step: Collective, dtype: DTypeLike) -> None:
        self.dtype = dtype
        # ppermute numbers devices in the mesh's order, for any order of its axes (jax 0.10).
        self.axes = tuple(a for a in jax.sharding.get_abstract_mesh().axis_names if a in step.axes)
        self.size, self.me = lax.axis_size(self.axes), lax.axis_index(self.axes)
        dims = zip(step.operand.dims, step.operand.axes, step.result.axes, strict=True)
        # The axes that the step removes from each letter, or adds to it.
        self.moved = {
            dim: tuple(axis for axis in max(before, after, key=len) if axis in step.axes)
            for dim, before, after in dims
            if before != after
        }

    def gathered(self, block: Array, uses: Sequence[_Use]) -> list[Array]:
        """The products of the travelling blocks with each use's staying array."""
        parts: list[list[tuple[Array, Array]]] = [[] for _ in uses]
        for step in range(self.size):
            index = (self.me + step) % self.size
            for (plan, travels, stays), products in zip(uses, parts, strict=True):
                einsum = plan.einsum
                if travels == "lhs":
                    pair = block, self._block(stays, einsum.rhs, index)
                else:
                    pair = self._block(stays, einsum.lhs, index), block
                products.append((index, self._multiply(einsum, *pair)))
            block = self._from(block, 1) if step < self.size - 1 else block
        return [self._joined(use.plan.einsum, each) for use, each in zip(uses, parts, strict=True)]

    def scattered(self, einsum: Einsum, lhs: Array, rhs: Array) -> Array:
        """This device's block of the product, summed over the ring."""
        total = None
        for step in range(self.size):
            index = (self.me - 1 - step) % self.size
            pair = self._block(lhs, einsum.lhs, index), self._block(rhs, einsum.rhs, index)
            part = self._multiply(einsum, *pair)
            total = part if total is None else self._from(total, -1) + part
        assert total is not None
        return total

    def _multiply(self, einsum: Einsum, lhs: Array, rhs: Array) -> Array:
        return jnp.einsum(str(einsum), lhs, rhs, preferred_element_type=self.dtype)

    def _from(self, x: Array, distance: int) -> Array:
        """`x` of the device `distance` further along the ring."""
        return lax.ppermute(x, self.axes, [((i + distance) % self.size, i) for i in range(self.size)])

    def _places(self, index: Array) -> dict[str, tuple[Array, int]]:
        """The number of block `index` along each letter, and the number of blocks."""
        at: dict[str, Array] = {}
        for axis in reversed(self.axes):
            at[axis], index = index % lax.axis_size(axis), index // lax.axis_size(axis)
        places: dict[str, tuple[Array, int]] = {}
        for letter, axes in self.moved.items():
            number = jnp.zeros((), index.dtype)
            for axis in axes:
                number = number * lax.axis_size(axis) + at[axis]
            places[letter] = number, lax.axis_size(axes)
        return places

    def _block(self, x: Array, letters: str, index: Array) -> Array:
        """Block `index` of an array that is whole along the ring's letters."""
        for letter, (number, count) in self._places(index).items():
            if letter in letters:
                dim = letters.index(letter)
                length = x.shape[dim] // count
                x = lax.dynamic_slice_in_dim(x, number * length, length, dim)
        return x

    def _joined(self, einsum: Einsum, blocks: list[tuple[Array, Array]]) -> Array:
        """Products of blocks, placed by their letters and added if they overlap."""
        first = blocks[0][1]
        if not set(self.moved) & set(einsum.out):
            return sum((part for _, part in blocks[1:]), start=first)
        counts = [self._places(self.me).get(letter, (None, 1))[1] for letter in einsum.out]
        whole = jnp.zeros([n * count for n, count in zip(first.shape, counts, strict=True)], self.dtype)
        for index, part in blocks:
            places = self._places(index)
            starts = [
                places[letter][0] * length if letter in places else jnp.zeros((), index.dtype)
                for letter, length in zip(einsum.out, part.shape, strict=True)
            ]
            total = lax.dynamic_slice(whole, starts, part.shape) + part
            whole = lax.dynamic_update_slice(whole, total, starts)
        return whole
