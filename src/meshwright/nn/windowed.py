"""A windowed (collective) matmul: one transfer of a contraction runs in steps under the product.

The n devices along the transfer's axes form a ring. A gathered operand goes round it a block a step,
each block multiplied while the next one arrives; a scattered product goes round as a sum to which
every device adds its part. Either sends n - 1 times.
Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition", 2023.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.nn.execute import run_steps
from meshwright.nn.mesh import partition_spec
from meshwright.notation.collective import Collective
from meshwright.notation.einsum import Contraction

Window = Literal["lhs", "rhs", "out"]


def windowed_contract(plan: Contraction, window: Window, dtype: Any, lhs: Array, rhs: Array) -> Array:
    """`plan.out`; the last gather of an operand, or the first scatter of the product, runs in steps.

    Call under `jax.set_mesh`. The ring is unrolled: XLA overlaps what does not depend on another.
    """
    before = {"lhs": plan.lhs_steps, "rhs": plan.rhs_steps}
    given = {"lhs": plan.lhs_computed, "rhs": plan.rhs_computed}
    result, after = plan.product, plan.out_steps
    step = windowed_step(plan, window)
    if window == "out":
        result, after = step.result, after[1:]
    else:
        given[window], before[window] = step.operand, before[window][:-1]

    def local(lhs: Array, rhs: Array) -> Array:
        ring = _Ring(plan, step, dtype)
        return ring.scattered(lhs, rhs) if window == "out" else ring.gathered(window, lhs, rhs)

    specs = (partition_spec(given["lhs"]), partition_spec(given["rhs"]))
    ring = jax.shard_map(local, in_specs=specs, out_specs=partition_spec(result), check_vma=False)
    return run_steps(ring(run_steps(lhs, before["lhs"]), run_steps(rhs, before["rhs"])), after)


def windowed_step(plan: Contraction, window: Window) -> Collective:
    """The transfer that runs in steps."""
    if window == "out":
        return plan.out_steps[0]
    return (plan.lhs_steps if window == "lhs" else plan.rhs_steps)[-1]


class _Ring:
    """The devices along a step's axes, each with a block of one letter. Lives inside `shard_map`."""

    def __init__(self, plan: Contraction, step: Collective, dtype: Any) -> None:
        self.einsum, self.axes, self.dtype = plan.einsum, step.axes, dtype
        self.size, self.me = lax.axis_size(step.axes), lax.axis_index(step.axes)
        dims = zip(step.operand.dims, step.operand.axes, step.result.axes, strict=True)
        (self.letter,) = [dim for dim, before, after in dims if before != after]

    def gathered(self, window: Window, lhs: Array, rhs: Array) -> Array:
        """The product of an operand that comes round in blocks with one that stays."""
        blocks = []
        for step in range(self.size):
            index = (self.me + step) % self.size
            if window == "lhs":
                part = self._multiply(lhs, self._block(rhs, self.einsum.rhs, index))
                lhs = self._from(lhs, 1) if step < self.size - 1 else lhs
            else:
                part = self._multiply(self._block(lhs, self.einsum.lhs, index), rhs)
                rhs = self._from(rhs, 1) if step < self.size - 1 else rhs
            blocks.append((index, part))
        return self._joined(blocks)

    def scattered(self, lhs: Array, rhs: Array) -> Array:
        """This device's block of the product, summed over the ring."""
        total = None
        for step in range(self.size):
            index = (self.me - 1 - step) % self.size
            pair = self._block(lhs, self.einsum.lhs, index), self._block(rhs, self.einsum.rhs, index)
            part = self._multiply(*pair)
            total = part if total is None else self._from(total, -1) + part
        assert total is not None
        return total

    def _multiply(self, lhs: Array, rhs: Array) -> Array:
        return jnp.einsum(str(self.einsum), lhs, rhs, preferred_element_type=self.dtype)

    def _from(self, x: Array, distance: int) -> Array:
        """`x` of the device so far along the ring."""
        return lax.ppermute(x, self.axes, [((i + distance) % self.size, i) for i in range(self.size)])

    def _block(self, x: Array, letters: str, index: Array) -> Array:
        """Block `index` of the ring's letter, or all of an array that lacks it."""
        if self.letter not in letters:
            return x
        dim = letters.index(self.letter)
        length = x.shape[dim] // self.size
        return lax.dynamic_slice_in_dim(x, index * length, length, dim)

    def _joined(self, blocks: list[tuple[Array, Array]]) -> Array:
        """Products of blocks: added where the letter is contracted, else put where they belong."""
        first = blocks[0][1]
        if self.letter in self.einsum.contracted:
            return sum((part for _, part in blocks[1:]), start=first)
        dim = self.einsum.out.index(self.letter)
        length, shape = first.shape[dim], list(first.shape)
        shape[dim] *= self.size
        whole = jnp.zeros(shape, self.dtype)
        for index, part in blocks:
            whole = lax.dynamic_update_slice_in_dim(whole, part, index * length, dim)
        return whole
