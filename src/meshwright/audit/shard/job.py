"""What a run on devices is asked for: a contraction, a strategy of one, or a reshard."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective
from meshwright.notation.einsum import Contraction, Side
from meshwright.notation.mesh import Mesh


@dataclass(frozen=True)
class ShardJob:
    """What is run: a contraction (plan), then steps of its result; or steps of an array alone.

    window: the transfer of the contraction that runs in steps under its product. gradients: of both
    operands too.
    """

    plan: Contraction | None
    then: tuple[Collective, ...]
    window: Side | None
    mesh: Mesh
    sizes: Mapping[str, int]
    dtype: str
    seed: int
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
