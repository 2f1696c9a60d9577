"""A contraction or a reshard to run on devices, without JAX."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective
from meshwright.notation.einsum import Contraction, EinsumSide
from meshwright.notation.mesh import Mesh


@dataclass(frozen=True)
class ShardJob:
    """A contraction (plan), then steps of its result; or only steps of an array.

    window: the transfer of the contraction that runs in steps under its product. gradients: run both
    operands' gradients too.
    """

    plan: Contraction | None
    then: tuple[Collective, ...]
    window: EinsumSide | None
    mesh: Mesh
    sizes: Mapping[str, int]
    dtype: str
    gradients: bool = False

    @property
    def operands(self) -> tuple[ShardedArray, ...]:
        return (self.plan.lhs, self.plan.rhs) if self.plan else (self.then[0].operand,)

    @property
    def result(self) -> ShardedArray:
        if self.then:
            return self.then[-1].result
        assert self.plan
        return self.plan.out

    @property
    def steps(self) -> list[Collective]:
        return [*(self.plan.steps if self.plan else ()), *self.then]
